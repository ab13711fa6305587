"""Runs a worker in a process that is stopped between requests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forerun.errors import ForerunError

ROOT = Path(__file__).parents[2]
SOURCES = os.pathsep.join(map(str, (ROOT, ROOT / "src")))  # workers run this checkout, wherever forerun is installed
NOT_INHERITED = ("OMP_", "GOMP_", "KMP_", "VLLM_", "LD_PRELOAD", "FORERUN_", "PYTHONPATH")
"""Prefixes of environment variables that would change the measurements."""


class WorkerError(ForerunError):
    """A request to a worker failed."""


class UnsupportedRequestError(WorkerError):
    """The peer does not support the request."""


class WorkerProcess:
    """A worker in a process group of its own, which is stopped by SIGSTOP while no request runs.

    So threads that spin or wake up by a timer take no time from the worker that is measured.
    """

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], log: Path) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(NOT_INHERITED)}
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env={**inherited, **environment, "PYTHONPATH": SOURCES},
                start_new_session=True,
            )
        self._signal(signal.SIGSTOP)

    def ask(self, request: str, **arguments: Any) -> dict[str, Any]:
        """Wake the worker, let it answer, and stop it again.

        Raises:
            UnsupportedRequestError: the peer does not support the request.
            WorkerError: the worker failed or died; the message names its log.
        """
        self._signal(signal.SIGCONT)
        try:
            reply = self._exchange(json.dumps({request: arguments}))
        finally:
            self._signal(signal.SIGSTOP)
        if "unsupported" in reply:
            raise UnsupportedRequestError(f"{request}: not supported by this worker; leave it out")
        if "error" in reply:
            raise WorkerError(f"{request}: worker answered {reply['error']}; see {self._log}")
        answer: dict[str, Any] = reply["ok"]
        return answer

    def _exchange(self, line: str) -> dict[str, Any]:
        assert self._process.stdin, "a pipe"
        assert self._process.stdout, "a pipe"
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise WorkerError(f"worker: died with exit code {self._process.wait()}; see {self._log}")
        reply: dict[str, Any] = json.loads(answer)
        return reply

    def close(self) -> None:
        """Kill the worker and the processes that it started."""
        self._signal(signal.SIGKILL)
        self._process.communicate()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)
