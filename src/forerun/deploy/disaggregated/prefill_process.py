"""The process that reads prompts, as the one that answers them sees it: started, told what to load, and ended."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import forerun
from forerun.deploy.disaggregated.channel import Channel
from forerun.deploy.disaggregated.prefill_client import PrefillClient
from forerun.errors import ConfigError, WorkerError

MODULE = "forerun.deploy.disaggregated.prefill"
LAST_WORDS_S = 5.0  # that the process has to end by itself


class PrefillProcess:
    """A process with an engine that reads prompts; it starts to import what it needs at once.

    Args:
        num_threads: that it computes with.
        cores: that it is bound to; none: it is left to the system to place.
    """

    def __init__(self, *, num_threads: int, cores: Sequence[int]) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigError(
                "prefill_threads: KV is handed over in memory by memfd_create, which only Linux has; leave it out"
            )
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        paths = [str(Path(forerun.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(num_threads)}
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(other.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                env={**os.environ, **environment},
                start_new_session=True,  # an interrupt at the terminal is for the process that answers
            )
        self.pid = self._process.pid
        self._owner = os.getpid()
        self._cores = list(cores)
        self._channel = Channel(own)
        self.client = PrefillClient(self._channel, end_of=self.end_of)

    def load(self, model: str, settings: Mapping[str, Any]) -> None:
        """Let it load the model with these settings of `LLM`.

        Raises:
            ConfigError: a setting cannot be written as JSON.
        """
        spec = {"model": model, "settings": dict(settings), "cores": self._cores}
        try:
            json.dumps(spec)
        except TypeError as error:
            raise ConfigError(
                f"prefill_threads: the settings go to another process as JSON, and one cannot ({error}); give names "
                "instead of classes"
            ) from None
        with suppress(OSError):  # it has ended, which `wait_until_ready` says
            self._channel.send(spec)

    def wait_until_ready(self, identity: Mapping[str, Any]) -> None:
        """Wait until it has loaded.

        Raises:
            WorkerError: it has not, or has loaded something else than the engine with this identity.
        """
        try:
            message = self._channel.receive()
        except EOFError:
            raise WorkerError(
                f"prefill process: {self.end_of()} before it had loaded; see its messages above"
            ) from None
        assert message is not None, "it is waited for"
        if "error" in message.header:
            raise WorkerError(f"prefill process: {message.header['error']}")
        found = message.header["identity"]
        different = [name for name, value in identity.items() if found.get(name) != value]
        if different:
            raise WorkerError(
                f"prefill process: it has loaded another {', '.join(different)} than this process; start again when nothing "
                "changes the model's files or forerun's"
            )

    def end_of(self) -> str:
        """Wait for its end, and say how it came; where that takes long it is killed."""
        self._wait()
        code = self._process.returncode
        return f"process {self.pid} " + (f"was killed (signal {-code})" if code < 0 else f"ended (exit status {code})")

    def close(self) -> None:
        """End it, and wait until it is gone; a forked child, which only has a copy of this, leaves it alone."""
        if os.getpid() == self._owner:
            self._channel.close()
            self._wait()

    def _wait(self) -> None:
        try:
            self._process.wait(LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
