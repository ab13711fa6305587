"""A run keeps its rounds, whatever ends it."""

from __future__ import annotations

from copy import deepcopy

import pytest

from benchmarks.peers import run
from benchmarks.peers.engines import contenders_of
from benchmarks.peers.run import Setup, run_all
from benchmarks.peers.schedule import Cell
from benchmarks.peers.worker_process import UnsupportedRequestError, WorkerError

CELLS = [
    Cell(kind="plain", index=0, request="generate", arguments={"prompts": [[7]], "max_tokens": 4}),
    Cell(kind="curve", index=0, request="curve", arguments={}),
]


class FakeWorker:
    """Writes the same tokens again and again, cannot compute a curve, and dies of its fifth text."""

    def __init__(self):
        self.num_texts = 0
        self.is_closed = False

    def ask(self, request, **arguments):
        if request == "curve":
            raise UnsupportedRequestError("curve")
        if request != "generate":
            return {"load": {"version": "1", "seconds": 1.0}, "bandwidth": {"bytes_per_second": 4e10}}[request]
        self.num_texts += 1
        if self.num_texts == 5:
            raise WorkerError("worker: died")
        tokens = [[1] * arguments["max_tokens"] for _ in arguments["prompts"]]
        return {"first_token_seconds": 1.0, "seconds": 2.0, "token_ids": tokens, "peak_bytes": 5}

    def close(self):
        self.is_closed = True


def test_rounds_before_a_worker_died_are_kept(tmp_path, monkeypatch):
    workers, kept = [], []

    def start(contender, python, *, setup):
        workers.append(FakeWorker())
        return workers[-1]

    monkeypatch.setattr(run, "start_worker", start)
    setup = Setup(model=tmp_path, environments=tmp_path, logs=tmp_path, num_threads=1)
    with pytest.raises(WorkerError):  # a text to load, one to warm up, one in each round
        run_all(
            contenders_of([]),
            CELLS,
            setup=setup,
            rounds=9,
            progress=lambda line: None,
            keep=lambda record, num_rounds: kept.append((deepcopy(record), num_rounds)),
        )
    assert [num_rounds for _, num_rounds in kept] == [1, 2]
    assert {one["round"] for one in kept[-1][0].measurements} == {0, 1}
    assert {one["kind"] for one in kept[-1][0].measurements} == {"plain"}
    assert all(worker.is_closed for worker in workers)
