"""Measures what replicas on Ray cost and bring: start, memory, latency, throughput, processor time of a chunk.

Run: python -m benchmarks.replicas [--model smollm2-135m] [--rounds 3] [--json FILE]

It needs the environment of `python -m benchmarks.peers install ray`. Each round starts, in turn, one server with one
thread, one replica with one thread, one server with all cores, and as many replicas as there are cores (4 at most);
every other round goes back. What Ray adds to latency is the difference of the first two; what replicas bring is the
ratio of the last two. The clients share the machine.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import site
import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from rich.console import Console
from rich.table import Table

import forerun
from benchmarks.peers.install import DEFAULT_FOLDER, python_in
from benchmarks.peers.schedule import turn
from benchmarks.serving import ServerStartError, is_option
from forerun.bench.machine import describe_machine
from forerun.deploy.ray.options import num_processors

PROGRAM = "from forerun.cli.app import program; program()"
NUM_WARM_REQUESTS, NUM_LATENCIES = 10, 200
NUM_CLIENTS, NUM_STREAMS, TOKENS_PER_STREAM = 8, 40, 100
MOST_REPLICAS = 4
START_S, STOP_S = 300.0, 60.0
MIB = 1 << 20


class Setup(NamedTuple):
    """A way to serve."""

    name: str
    threads: int
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What was measured of one setup in one round."""

    setup: str
    start_seconds: float
    resident_mib: float  # proportional, of all processes
    latency_p50_ms: float  # of requests for one token, one at a time
    latency_p99_ms: float
    tokens_per_second: float
    cpu_ms_per_chunk: float  # of all processes, the model's computation included


def setups(num_cores: int) -> list[Setup]:
    """The ways to serve that are compared."""
    most = min(num_cores, MOST_REPLICAS)
    return [
        Setup("one server, 1 thread", 1, ()),
        Setup("1 replica, 1 thread", 1, ("--replicas", "1")),
        Setup(f"one server, {num_cores} threads", num_cores, ()),
        Setup(f"{most} replicas, {num_cores // most} threads each", num_cores, ("--replicas", str(most))),
    ]


@contextmanager
def serving(model: str, setup: Setup) -> Iterator[tuple[int, psutil.Process, float]]:
    """Start a service; its port, its process, and the seconds until it was ready.

    Raises:
        ServerStartError: it ended before it was ready.
    """
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    paths = [str(Path(forerun.__file__).parents[1]), *site.getsitepackages()]
    environment = {name: value for name, value in os.environ.items() if not is_option(name)}
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(setup.threads)}
    words = ["serve", model, "--port", str(port), "--no-speculation", "--disable-log-stats", *setup.words]
    start = time.monotonic()
    process = subprocess.Popen(
        [str(python_in("ray", DEFAULT_FOLDER)), "-c", PROGRAM, *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        if not any(line.startswith("ready:") for line in process.stdout):
            raise ServerStartError(f"{setup.name}: the service ended before it was ready")
        yield port, psutil.Process(process.pid), time.monotonic() - start
    finally:
        process.terminate()
        process.wait(STOP_S)


def family(root: psutil.Process) -> list[psutil.Process]:
    """A process and all that it has started."""
    return [root, *root.children(recursive=True)]


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """Processor time so far."""
    times = [one.cpu_times() for one in processes if one.is_running()]
    return float(sum(one.user + one.system for one in times))


def ask(port: int, model: str, *, prompt: str, max_tokens: int, stream: bool) -> int:
    """The number of chunks of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    fields = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    body = json.dumps(fields | {"ignore_eos": True, "stream": stream})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    if answer.status != http.client.OK:
        raise ServerStartError(f"the service answers {answer.status}: {text[:200]}")
    return text.count("data: {")


def latencies(port: int, model: str) -> list[float]:
    """Milliseconds of requests for one token, one after the other."""
    found = []
    for number in range(NUM_WARM_REQUESTS + NUM_LATENCIES):
        start = time.perf_counter()
        ask(port, model, prompt=f"{number} is", max_tokens=1, stream=False)
        found.append((time.perf_counter() - start) * 1e3)
    return found[NUM_WARM_REQUESTS:]


def stream_all(port: int, model: str) -> tuple[float, int]:
    """Seconds that all streams took together, and their chunks."""
    numbers, chunks, lock = iter(range(NUM_STREAMS)), [0], threading.Lock()

    def client() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            count = ask(port, model, prompt=f"Story {number}:", max_tokens=TOKENS_PER_STREAM, stream=True)
            with lock:
                chunks[0] += count

    threads = [threading.Thread(target=client) for _ in range(NUM_CLIENTS)]
    start = time.perf_counter()
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return time.perf_counter() - start, chunks[0]


def measure(model: str, setup: Setup) -> Figures:
    """Start a setup and measure it."""
    with serving(model, setup) as (port, root, seconds):
        times = latencies(port, model)
        processes = family(root)
        before = cpu_seconds(processes)
        wall, num_chunks = stream_all(port, model)
        used = cpu_seconds(processes) - before
        resident = sum(one.memory_full_info().pss for one in processes if one.is_running())
        return Figures(
            setup=setup.name,
            start_seconds=seconds,
            resident_mib=resident / MIB,
            latency_p50_ms=statistics.median(times),
            latency_p99_ms=statistics.quantiles(times, n=100)[-1],
            tokens_per_second=NUM_STREAMS * TOKENS_PER_STREAM / wall,
            cpu_ms_per_chunk=used / num_chunks * 1e3,
        )


def show(found: Sequence[Figures]) -> None:
    """Print medians over the rounds."""
    columns = [name for name in asdict(found[0]) if name != "setup"]
    table = Table("setup", *(name.replace("_", " ") for name in columns))
    for setup in dict.fromkeys(one.setup for one in found):
        rounds = [asdict(one) for one in found if one.setup == setup]
        table.add_row(setup, *(f"{statistics.median(one[name] for one in rounds):.1f}" for name in columns))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    ways = setups(num_processors())
    found = [measure(arguments.model, one) for number in range(arguments.rounds) for one in turn(ways, number)]
    show(found)
    if arguments.json is not None:
        report = {"machine": describe_machine(torch.device("cpu")), "figures": [asdict(one) for one in found]}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
