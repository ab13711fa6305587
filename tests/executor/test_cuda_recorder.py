"""How CUDA graphs are recorded, and that a recording that fails does not spoil the next: on a stand-in for torch.cuda that keeps its rules."""

from __future__ import annotations

import gc
from contextlib import contextmanager

import pytest
import torch

from forerun.executor.step_graphs import CudaRecorder

GPU = torch.device("cuda:1")


class Stream:
    def __init__(self, device):
        self.device = device
        self.waits_for = []

    def wait_stream(self, other):
        self.waits_for.append(other)


class StandIn:
    """What `CudaRecorder` asks of torch.cuda: notes on which stream functions are called, and in which pool graphs are.

    As in torch, a pool whose graphs are all gone takes no other graph as long as a tensor of theirs is held: here always. And `graph`
    ends what the allocator notes of a recording only where the driver could end that, and else leaves its own stream in use.
    """

    def __init__(self):
        self.current = self.usual = Stream(GPU)
        self.streams, self.graphs, self.replayed = [], [], []
        self.num_pools, self.underway, self.is_invalid = 0, [], False
        outer = self

        class CUDAGraph:
            def __init__(self):
                self.number = len(outer.graphs)
                outer.graphs.append({"is alive": True, "pool": None})

            def replay(self):
                outer.replayed.append(self.number)

            def __del__(self):
                outer.graphs[self.number]["is alive"] = False

        self.make_graph = CUDAGraph

    def make_stream(self, device):
        self.streams.append(Stream(device))
        return self.streams[-1]

    def current_stream(self):
        return self.current

    def make_pool(self):
        self.num_pools += 1
        return self.num_pools

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph, *, pool, stream, capture_error_mode):
        if self.underway:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
        users = [one["is alive"] for one in self.graphs if one["pool"] == pool]
        if users and not any(users):
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        self.graphs[graph.number] |= {"pool": pool, "mode": capture_error_mode}
        self.underway.append(pool)
        before, self.current = self.current, stream
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

    def pools(self, *numbers):
        return [self.graphs[number]["pool"] for number in numbers]


@pytest.fixture
def cuda(monkeypatch):
    stand_in = StandIn()
    replaced = {
        "Stream": stand_in.make_stream,
        "CUDAGraph": stand_in.make_graph,
        "graph_pool_handle": stand_in.make_pool,
        "current_device": lambda: 1,
        "current_stream": stand_in.current_stream,
        "stream": stand_in.stream,
        "graph": stand_in.graph,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", stand_in.end, raising=False)
    return stand_in


def step():
    return "outputs"


def failing(message, cuda, *, is_invalid):
    """A step that is computed once and then cannot be recorded."""
    calls = []

    def function():
        calls.append(1)
        if len(calls) == 2:
            cuda.is_invalid = is_invalid
            raise RuntimeError(message)
        return "outputs"

    return function


def test_a_step_is_compiled_and_recorded_on_one_stream_of_its_own_gpu(cuda):
    recorder, seen = CudaRecorder(GPU), []
    for _ in range(2):
        assert recorder.record(lambda: seen.append(cuda.current) or "outputs").outputs == "outputs"
    [stream] = cuda.streams
    assert stream.device == GPU
    assert seen == [stream] * 4
    assert stream.waits_for == [cuda.usual] * 2
    assert cuda.usual.waits_for == [stream] * 2


def test_graphs_share_a_pool_and_other_threads_may_ask_something_of_cuda_meanwhile(cuda):
    recorder = CudaRecorder(GPU)
    kept = [recorder.record(step) for _ in range(3)]
    assert len(set(cuda.pools(0, 1, 2))) == 1
    assert {one["mode"] for one in cuda.graphs} == {"thread_local"}
    kept[1].replay()
    assert cuda.replayed == [1]


def test_graphs_that_take_the_place_of_forgotten_ones_have_a_pool_of_their_own(cuda):
    """As where another head is drafted with while a result of the last one is still held."""
    recorder = CudaRecorder(GPU)
    forgotten = [recorder.record(step) for _ in range(2)]
    forgotten.clear()
    gc.collect()
    kept = [recorder.record(step) for _ in range(2)]
    assert len(kept) == 2
    old, new = (set(cuda.pools(*numbers)) for numbers in ((0, 1), (2, 3)))
    assert len(old) == len(new) == 1
    assert old != new


def test_after_memory_was_short_other_steps_are_recorded_in_the_pool_of_those_before(cuda):
    recorder = CudaRecorder(GPU)
    kept = [recorder.record(step)]
    with pytest.raises(RuntimeError, match="out of memory"):
        recorder.record(failing("CUDA out of memory", cuda, is_invalid=False))
    assert cuda.underway == []
    kept.append(recorder.record(step))
    assert len(set(cuda.pools(0, 1, 2))) == 1


@pytest.mark.parametrize("is_first", [False, True])
def test_after_a_recording_was_invalid_the_allocator_forgets_it_and_the_stream_is_the_usual_one(cuda, is_first):
    recorder = CudaRecorder(GPU)
    kept = [] if is_first else [recorder.record(step)]
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        recorder.record(failing("operation not permitted when stream is capturing", cuda, is_invalid=True))
    assert cuda.underway == []
    assert cuda.current is cuda.usual
    cuda.is_invalid = False
    kept.append(recorder.record(step))
    assert kept[-1].outputs == "outputs"
    *_, invalid, last = range(len(cuda.graphs))
    assert cuda.pools(invalid) != cuda.pools(last), "of pinned memory the first one is still spoken for"
