"""A worker's process answers line by line, is stopped in between, and reports failures."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from benchmarks.peers.worker_process import UnsupportedRequestError, WorkerError, WorkerProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process groups and /proc as Linux has them")

LOAD = {"model": "none", "max_model_len": 8, "num_threads": 2, "speculation": None}


@pytest.fixture
def worker(tmp_path):
    command = [sys.executable, "-m", "tests.benchmarks.peers.fake_worker"]
    process = WorkerProcess(command, environment={}, log=tmp_path / "logs" / "fake.log")
    yield process
    process.close()


def state_of(worker: WorkerProcess) -> str:
    """R running, S sleeping, T stopped."""
    stat = Path(f"/proc/{worker._process.pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0]


def test_a_worker_answers_what_it_is_asked(worker):
    assert worker.ask("load", **LOAD)["version"] == "fake 2"
    answer = worker.ask("generate", prompts=[[5, 6, 7]], max_tokens=4)
    assert answer["token_ids"] == [[3, 3, 3, 3]]
    assert (answer["drafted"], answer["accepted"]) == (2, 1)
    assert answer["seconds"] >= 0
    assert answer["peak_bytes"] > 1 << 20


def test_between_requests_a_worker_is_stopped(worker):
    worker.ask("load", **LOAD)
    deadline = time.monotonic() + 5
    while state_of(worker) != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert state_of(worker) == "T"


def test_an_unsupported_request_is_no_failure(worker):
    worker.ask("load", **LOAD)
    with pytest.raises(UnsupportedRequestError, match="curve: not supported"):
        worker.ask("curve", rows=[1], context=1, repeats=1)


def test_a_failure_comes_with_its_message(worker):
    with pytest.raises(WorkerError, match="got 'generate' before load"):
        worker.ask("generate", prompts=[[1]], max_tokens=1)


def test_too_few_tokens_are_a_failure(worker):
    worker.ask("load", **LOAD)
    with pytest.raises(WorkerError, match="asked for 4 tokens, got 1"):
        worker.ask("generate", prompts=[[14]], max_tokens=4)


def test_the_error_of_a_death_names_the_log(worker):
    worker.ask("load", **LOAD)
    with pytest.raises(WorkerError, match=r"died with exit code 3; see .*fake\.log"):
        worker.ask("generate", prompts=[[13]], max_tokens=1)
