"""A `forerun serve` in a process of its own, for those who measure or try it as its users would."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from forerun.errors import ForerunError

FORERUN = [sys.executable, "-c", "import sys; from forerun.cli.app import main; sys.exit(main(sys.argv[1:]))"]
"""The command `forerun` of this very environment."""

STOP_S = 60.0


class ServerStartError(ForerunError):
    """The server ended before it was ready."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """Where it listens, and its process."""

    url: str
    process: psutil.Process

    def cpu_seconds(self) -> float:
        """Processor time that it has taken, of all its threads."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def resident_bytes(self) -> int:
        """Memory that it holds."""
        return int(self.process.memory_info().rss)


def is_option(variable: str) -> bool:
    """Whether the server would take one of its options from an environment variable."""
    return variable.startswith("FORERUN_") and not variable.startswith(("FORERUN_CACHE", "FORERUN_CPU"))


@contextmanager
def serving(*arguments: str, log: Path) -> Iterator[RunningServer]:
    """A server, ready, on a free port; `arguments` as for `forerun serve`, its messages go to `log`.

    Raises:
        ServerStartError: it did not come up.
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
