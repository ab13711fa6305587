"""Runs `forerun serve` in a process of its own, for benchmarks and tests over HTTP."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.command_line import OWN_VARIABLES
from forerun.errors import ForerunError

FORERUN = [sys.executable, "-c", "import sys; from forerun.cli.app import main; sys.exit(main(sys.argv[1:]))"]
"""The command `forerun` of the present environment."""

STOP_S = 60.0


class ServerStartError(ForerunError):
    """The server ended before it was ready."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """The address and the process of a server."""

    url: str
    process: psutil.Process

    def cpu_seconds(self) -> float:
        """Processor time of all its threads so far."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def resident_bytes(self) -> int:
        """Its resident memory."""
        return int(self.process.memory_info().rss)


def is_option(variable: str) -> bool:
    """Whether the server would take one of its options from an environment variable."""
    return variable.startswith("FORERUN_") and variable not in OWN_VARIABLES


@contextmanager
def serving(*arguments: str, log: Path) -> Iterator[RunningServer]:
    """Start a server on a free port and wait until it is ready.

    Args:
        arguments: of `forerun serve`.
        log: the file for its messages.

    Raises:
        ServerStartError: the server ended before it was ready.
    """
    environment = {name: value for name, value in os.environ.items() if not is_option(name)}
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*FORERUN, "serve", *arguments, "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )
    try:
        yield RunningServer(_ready_url(process, log), psutil.Process(process.pid))
    finally:
        process.terminate()
        process.communicate(timeout=STOP_S)


def _ready_url(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout, "a pipe"
    for line in process.stdout:
        if line.startswith("ready: "):
            return line.split()[1]
    raise ServerStartError(f"forerun serve: ended with {process.wait()}; see {log}")
