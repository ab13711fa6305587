"""What a failed recording leaves behind does not spoil the next: over a stand-in for torch's graphs, as there is no GPU."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from forerun.executor.step_graphs import CudaRecorder


class Torch:
    """The part of torch that records graphs: its allocator notes by which pool it serves a recording.

    As in torch, `graph` ends that only where the driver could end the recording, and else leaves its own stream in use.
    """

    def __init__(self):
        self.usual = SimpleNamespace(wait_stream=lambda _: None)
        self.current, self.num_pools, self.underway, self.is_invalid = self.usual, 0, [], False

    def pool(self):
        self.num_pools += 1
        return (0, self.num_pools)

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph, pool):
        if self.underway:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
        self.underway.append(pool)
        before, self.current = self.current, "recording"
        try:
            yield
        finally:
            if self.is_invalid:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
            self.underway.remove(pool)
            self.current = before

    def end(self, _device, pool):
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)


@pytest.fixture
def fake(monkeypatch):
    fake = Torch()
    beside = SimpleNamespace(wait_stream=lambda _: None)
    replaced = {
        "graph_pool_handle": fake.pool,
        "stream": fake.stream,
        "graph": fake.graph,
        "Stream": lambda: beside,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "current_device": lambda: 0,
        "current_stream": lambda: fake.current,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", fake.end)
    return fake


def failing(message, fake, *, is_invalid):
    """A step that is computed once and then cannot be recorded."""
    calls = []

    def function():
        calls.append(1)
        if len(calls) == 2:
            fake.is_invalid = is_invalid
            raise RuntimeError(message)
        return "outputs"

    return function


def test_after_memory_was_short_other_steps_are_recorded_in_the_same_pool(fake):
    recorder = CudaRecorder()
    with pytest.raises(RuntimeError, match="out of memory"):
        recorder.record(failing("CUDA out of memory", fake, is_invalid=False))
    assert fake.underway == []
    assert recorder.record(lambda: "outputs").outputs == "outputs"
    assert fake.num_pools == 1


def test_after_a_recording_was_invalid_the_allocator_forgets_it_and_the_stream_is_the_usual_one(fake):
    recorder = CudaRecorder()
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        recorder.record(failing("operation not permitted when stream is capturing", fake, is_invalid=True))
    assert fake.underway == []
    assert fake.current is fake.usual
    fake.is_invalid = False
    assert recorder.record(lambda: "outputs").outputs == "outputs"
    assert fake.num_pools == 2, "of pinned memory the first one is still spoken for"
