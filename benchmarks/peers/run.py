"""Runs the benchmark interleaved: the contenders answer each request one right after the other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.engines import FORERUN, PEERS, Contender, plain_contender
from benchmarks.peers.install import python_of, weights_of
from benchmarks.peers.schedule import Cell, one_of_each_kind, turn
from benchmarks.peers.worker_process import UnsupportedRequestError, WorkerProcess

MAX_MODEL_LEN = 2048

Progress = Callable[[str], None]
Keep = Callable[["Record", int], None]
"""Is called with all figures so far, and the number of rounds that they are of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The settings of all contenders."""

    model: Path
    environments: Path
    logs: Path
    num_threads: int


@dataclass(slots=True)
class Record:
    """The figures of a run, by contender, as they are written to JSON.

    `memory` is the peak in bytes of a process that generated one sequence; `unsupported` lists the kinds
    of cells that a contender cannot answer.
    """

    versions: dict[str, str] = field(default_factory=dict)
    load_seconds: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    unsupported: dict[str, list[str]] = field(default_factory=dict)
    measurements: list[dict[str, Any]] = field(default_factory=list)


def run_all(
    contenders: Sequence[Contender], cells: Sequence[Cell], *, setup: Setup, rounds: int, progress: Progress, keep: Keep
) -> None:
    """Start all contenders, warm them up, and measure all cells `rounds` times; what they say is kept after each round.

    Raises:
        ForerunError: an environment is missing, or a worker failed.
    """
    record = Record()
    pythons = {contender.peer: python_of(PEERS[contender.peer], setup.environments) for contender in contenders}
    with ExitStack() as stack:
        workers: dict[str, WorkerProcess] = {}
        for contender in contenders:
            progress(f"loading {contender.name}")
            worker = start_worker(contender, pythons[contender.peer], setup=setup)
            stack.callback(worker.close)
            workers[contender.name] = worker
            _load(worker, contender, setup=setup, record=record, first=cells[0])
        measuring = Measuring(contenders, workers, record)
        for cell in one_of_each_kind(cells):
            progress(f"warming up: {cell.kind}")
            measuring.warm_up(cell)
        for round_number in range(rounds):
            for number, cell in enumerate(cells):
                progress(f"round {round_number + 1} of {rounds}: {cell.kind} {cell.index + 1}")
                measuring.measure(cell, round_number=round_number, turn_number=round_number + number)
            keep(record, round_number + 1)


def start_worker(contender: Contender, python: Path, *, setup: Setup) -> WorkerProcess:
    """Start the peer's worker in its own environment, with threads as the peer's documentation recommends."""
    peer = PEERS[contender.peer]
    values = {
        "threads": str(setup.num_threads),
        "cores": f"0-{setup.num_threads - 1}",
        "venv": str(setup.environments / peer.name),
    }
    return WorkerProcess(
        [str(python), "-m", f"benchmarks.peers.workers.{peer.name}"],
        environment={variable: value.format(**values) for variable, value in peer.environment.items()},
        log=setup.logs / f"{contender.name}.log",
    )


def _load(worker: WorkerProcess, contender: Contender, *, setup: Setup, record: Record, first: Cell) -> None:
    """Load the model and generate one sequence, after which the peak memory is recorded."""
    loaded = worker.ask(
        "load",
        model=str(weights_of(PEERS[contender.peer], setup.model, setup.environments)),
        max_model_len=MAX_MODEL_LEN,
        num_threads=setup.num_threads,
        speculation=contender.speculation,
    )
    record.versions[contender.name] = loaded["version"]
    record.load_seconds[contender.name] = loaded["seconds"]
    record.memory[contender.name] = worker.ask(first.request, **first.arguments)["peak_bytes"]


class Measuring:
    """Gives the contenders cell after cell and records their answers."""

    def __init__(self, contenders: Sequence[Contender], workers: dict[str, WorkerProcess], record: Record) -> None:
        self._contenders = contenders
        self._workers = workers
        self._record = record
        self._prober = workers[plain_contender(FORERUN.name).name]

    def warm_up(self, cell: Cell) -> None:
        """Let all contenders answer once, and record those that cannot."""
        for contender in self._contenders:
            try:
                if cell.concerns(contender):
                    self._workers[contender.name].ask(cell.request, **cell.arguments)
            except UnsupportedRequestError:
                self._record.unsupported.setdefault(contender.name, []).append(cell.kind)

    def measure(self, cell: Cell, *, round_number: int, turn_number: int) -> None:
        """Record an answer of each contender concerned, and the memory bandwidth measured right before."""
        bandwidth = self._prober.ask("bandwidth")["bytes_per_second"]
        for contender in turn(self._contenders, turn_number):
            if not cell.concerns(contender) or cell.kind in self._record.unsupported.get(contender.name, []):
                continue
            answer = self._workers[contender.name].ask(cell.request, **cell.arguments)
            where = {"round": round_number, "kind": cell.kind, "index": cell.index, "contender": contender.name}
            self._record.measurements.append({**where, "bytes_per_second": bandwidth, **_without_text(answer)})


def _without_text(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer with a digest in place of its tokens, which suffices to compare texts and publishes none."""
    token_ids = answer.pop("token_ids", None)
    if token_ids is None:
        return answer
    digest = hashlib.sha256(json.dumps(token_ids).encode()).hexdigest()[:16]
    return {**answer, "num_sequences": len(token_ids), "num_tokens": sum(map(len, token_ids)), "text": digest}
