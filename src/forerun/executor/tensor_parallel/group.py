"""The processes of a tensor-parallel group, as rank 0 sees them: started, watched and ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import forerun
from forerun.errors import WorkerError
from forerun.executor.tensor_parallel.worker_process import WorkerSpec
from forerun.ops.native.sharded.exchange import Exchange, Leader

KERNELS, TORCH = "forerun.executor.tensor_parallel.worker", "forerun.executor.tensor_parallel.torch_worker"
"""Modules of workers, by what computes their parts."""

LAST_WORDS_S = 5.0  # that a worker has to end by itself


class WorkerProcess:
    """One process of the group, which imports what it needs as soon as it is started."""

    def __init__(self, rank: int, descriptor: int, module: str = KERNELS) -> None:
        self.rank = rank
        package = str(Path(forerun.__file__).parents[1])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(descriptor)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[descriptor],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # an interrupt at the terminal is for rank 0, which decides what it ends
            text=True,
        )
        self.pid = self._process.pid

    def send(self, spec: WorkerSpec) -> None:
        """Let it load its part."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; `wait_until_ready` says so
            self._process.stdin.write(spec.to_json() + "\n")
            self._process.stdin.flush()

    def wait_until_ready(self) -> None:
        """Wait until it has loaded its part.

        Raises:
            WorkerError: it has not.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(f"tensor parallel: {self.end_of()} before it had loaded its part; see its messages above")
        error = json.loads(line)["error"]
        if error is not None:
            raise WorkerError(error)

    def end_of(self) -> str:
        """Wait for its end, and say how it came."""
        code = self._process.wait()
        how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended (exit status {code})"
        return f"rank {self.rank} (process {self.pid}) {how}"

    def close(self) -> None:
        """Ask it to end, which its standard input does."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def join(self) -> None:
        """Wait for its end, and kill it where that takes long."""
        try:
            self._process.wait(LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def nothing_more() -> None:
    """What else is to be done at a group's end where all ranks wait in the shared memory alone."""


def watch(leader: Leader, workers: Sequence[WorkerProcess], abort: Callable[[], None] = nothing_more) -> None:
    """End the group as soon as a worker ends, and end the workers when the leader is no longer used.

    `abort` lets what waits for a worker that is gone elsewhere than in the shared memory fail.
    """
    reference = weakref.ref(leader)
    for worker in workers:
        arguments = (worker, leader.exchange, reference, abort)
        threading.Thread(target=_watch, args=arguments, name=f"watch-rank-{worker.rank}", daemon=True).start()
    finalizer = weakref.finalize(leader, end, workers, leader.exchange)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=finalizer.detach)  # the workers are the parent's, and stay when a child ends


def _watch(
    worker: WorkerProcess, exchange: Exchange, reference: weakref.ref[Leader], abort: Callable[[], None]
) -> None:
    how = worker.end_of()
    leader = reference()
    if leader is not None:
        leader.explain(how)
    exchange.end(worker.rank)
    abort()


def end(workers: Sequence[WorkerProcess], exchange: Exchange | None = None) -> None:
    """End the workers and wait until they are gone; their memory goes with the last of them."""
    if exchange is not None:
        exchange.end(0)
    for worker in workers:
        worker.close()
    for worker in workers:
        worker.join()
