"""How CUDA graphs are recorded, on a stand-in for torch.cuda that keeps its rules."""

from __future__ import annotations

import gc
from contextlib import contextmanager

import pytest
import torch

from forerun.executor.step_graphs import CudaRecorder, Recorded

GPU = torch.device("cuda:1")


class Stream:
    def __init__(self, device):
        self.device = device
        self.waits_for = []

    def wait_stream(self, other):
        self.waits_for.append(other)


class StandIn:
    """What `CudaRecorder` asks of torch.cuda: notes on which stream functions are called, and in which pool graphs are.

    As in torch, a pool whose graphs are all gone takes no other graph as long as a tensor of theirs is held: here always.
    """

    def __init__(self):
        self.current = self.own = Stream(GPU)
        self.streams, self.graphs, self.calls = [], [], []
        self.num_pools = 0
        outer = self

        class CUDAGraph:
            is_alive = True

            def __init__(self):
                outer.graphs.append([True, None, None])
                self.number = len(outer.graphs) - 1

            def replay(self):
                outer.calls.append(("replayed", self.number))

            def __del__(self):
                outer.graphs[self.number][0] = False

        self.make_graph = CUDAGraph

    def make_stream(self, device):
        self.streams.append(Stream(device))
        return self.streams[-1]

    def current_stream(self):
        return self.current

    def graph_pool_handle(self):
        self.num_pools += 1
        return self.num_pools

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def graph(self, graph, *, pool, stream, capture_error_mode):
        users = [is_alive for is_alive, used, _ in self.graphs if used == pool]
        if users and not any(users):
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        self.graphs[graph.number][1:] = pool, capture_error_mode
        with self.stream(stream):
            yield


@pytest.fixture
def cuda(monkeypatch):
    stand_in = StandIn()
    monkeypatch.setattr(torch.cuda, "Stream", stand_in.make_stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", stand_in.make_graph)
    for name in ("current_stream", "graph_pool_handle", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(stand_in, name))
    return stand_in


def test_a_function_is_compiled_and_recorded_on_one_stream_of_its_own_gpu(cuda):
    recorder, seen = CudaRecorder(GPU), []
    first, second = (recorder.record(lambda: seen.append(cuda.current) or "outputs") for _ in range(2))
    assert [first.outputs, second.outputs] == ["outputs", "outputs"]
    [stream] = cuda.streams
    assert stream.device == GPU
    assert seen == [stream] * 4
    assert stream.waits_for == [cuda.own] * 2
    assert cuda.own.waits_for == [stream] * 2


def test_graphs_share_a_pool_and_other_threads_may_ask_something_of_cuda_meanwhile(cuda):
    recorder = CudaRecorder(GPU)
    kept: list[Recorded] = [recorder.record(lambda: "outputs") for _ in range(3)]
    assert len({pool for _, pool, _ in cuda.graphs}) == 1
    assert {mode for *_, mode in cuda.graphs} == {"thread_local"}
    kept[1].replay()
    assert cuda.calls == [("replayed", 1)]


def test_graphs_that_take_the_place_of_forgotten_ones_have_a_pool_of_their_own(cuda):
    """As where another head is drafted with while a result of the last one is still held."""
    recorder = CudaRecorder(GPU)
    forgotten = [recorder.record(lambda: "outputs") for _ in range(2)]
    forgotten.clear()
    gc.collect()
    kept = [recorder.record(lambda: "outputs") for _ in range(2)]
    assert len(kept) == 2
    old, new = {pool for _, pool, _ in cuda.graphs[:2]}, {pool for _, pool, _ in cuda.graphs[2:]}
    assert len(old) == len(new) == 1
    assert old != new
