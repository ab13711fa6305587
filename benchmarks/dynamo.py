"""Dynamo's frontend and workers of forerun, as processes of this machine, for benchmarks and slow tests.

They need an environment of their own: python -m benchmarks.peers install dynamo_worker.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

import forerun
from benchmarks.serving import is_option
from forerun.errors import ForerunError

ENVIRONMENT = "dynamo_worker"
PROGRAM = "import sys; from forerun.cli.app import main; sys.exit(main(sys.argv[1:]))"
NAME = "served"
START_S = 120.0
STOP_S = 30.0
PLANES = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")


class DynamoStartError(ForerunError):
    """A process ended, or did not serve in time."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker: its process, and the port of its metrics."""

    process: psutil.Process
    system_port: int

    def metrics(self) -> str:
        """Its metrics, in Prometheus' text format."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.system_port}/metrics", timeout=10) as response:
            text: str = response.read().decode()
        return text

    def num_running(self) -> float:
        """Requests that it computes."""
        return next(
            float(line.rpartition(" ")[2])
            for line in self.metrics().splitlines()
            if line.startswith("vllm:num_requests_running{")
        )

    def kill(self) -> None:
        """End it as a crash does."""
        self.process.kill()
        self.process.wait(STOP_S)


@dataclass(slots=True)
class Deployment:
    """A frontend with its workers; `folder` holds the logs."""

    url: str
    frontend: psutil.Process
    python: Path
    folder: Path
    model: str
    arguments: tuple[str, ...]
    workers: list[Worker] = field(default_factory=list)
    num_started: int = 0

    def add_worker(self) -> Worker:
        """Start another worker and wait until it serves.

        Raises:
            DynamoStartError: it ended, or took too long.
        """
        self.num_started += 1
        port = free_port()
        words = ["-c", PROGRAM, "dynamo-worker", self.model, "--served-model-name", NAME, *self.arguments]
        log = self.folder / f"worker-{self.num_started}.log"
        worker = Worker(_start(self.python, words, self.folder, log, DYN_SYSTEM_PORT=str(port)), port)
        self.workers.append(worker)
        _wait(lambda: '"generate":"ready"' in _read(f"http://127.0.0.1:{port}/health"), worker.process, log)
        return worker

    def stop(self) -> None:
        """End all processes."""
        processes = [*(worker.process for worker in self.workers), self.frontend]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        _, alive = psutil.wait_procs(processes, timeout=STOP_S)
        for process in alive:
            process.kill()


@contextmanager
def dynamo_serving(
    python: Path, model: str, *arguments: str, folder: Path, num_workers: int, router_mode: str = "kv"
) -> Iterator[Deployment]:
    """Start a frontend and workers on this machine and wait until they serve.

    Args:
        python: the interpreter of the environment.
        model: as `forerun dynamo-worker` takes it.
        arguments: of each worker.
        folder: for logs and for the files by which the processes find each other.
        num_workers: how many are started.
        router_mode: of the frontend.

    Raises:
        DynamoStartError: a process ended, or took too long.
    """
    port = free_port()
    words = ["-m", "dynamo.frontend", "--http-port", str(port), *PLANES, "--router-mode", router_mode]
    log = folder / "frontend.log"
    frontend = _start(python, [*words, "--migration-limit", "3"], folder, log)
    deployment = Deployment(f"http://127.0.0.1:{port}", frontend, python, folder, model, arguments)
    try:
        for _ in range(num_workers):
            deployment.add_worker()
        _wait(lambda: f'"{NAME}"' in _read(f"{deployment.url}/v1/models"), frontend, log)
        yield deployment
    finally:
        deployment.stop()


def free_port() -> int:
    """A port that nobody listens on; Dynamo reads that of a worker's metrics as 16 bits with a sign."""
    while True:
        port = random.randrange(10000, 2**15)
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


def _start(python: Path, words: list[str], folder: Path, log: Path, **variables: str) -> psutil.Process:
    environment = {name: value for name, value in os.environ.items() if not is_option(name)}
    environment |= {"PYTHONPATH": str(Path(forerun.__file__).parents[1]), "DYN_FILE_KV": str(folder / "discovery")}
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(python), *words], stdout=output, stderr=subprocess.STDOUT, env=environment | variables
        )
    return psutil.Process(process.pid)


def _read(url: str) -> str:
    with suppress(OSError), urllib.request.urlopen(url, timeout=5) as response:
        text: str = response.read().decode()
        return text
    return ""


def _wait(is_ready: Callable[[], bool], process: psutil.Process, log: Path) -> None:
    end = time.monotonic() + START_S
    while not is_ready():
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE or time.monotonic() > end:
            raise DynamoStartError(f"dynamo: a process does not serve; {log} says why:\n{log.read_text()[-2000:]}")
        time.sleep(0.2)
