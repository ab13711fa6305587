"""What ranks exchange through torch.distributed arrives whole, and a rank that is gone is an error."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from forerun.errors import WorkerError
from forerun.ops.collectives import TorchCollectives

CPU = torch.device("cpu")


@pytest.fixture
def ranks():
    """Three ranks, each to be used by a thread of its own."""
    return connected()


def connected():
    first = TorchCollectives(CPU, rank=0, num_ranks=3)
    group = [first, *(TorchCollectives(CPU, rank=rank, num_ranks=3, port=first.port) for rank in (1, 2))]
    together(group, TorchCollectives.connect)
    return group


def together(group, call):
    """What a call gives on each rank, made on all at once."""
    with ThreadPoolExecutor(len(group)) as threads:
        futures = [threads.submit(call, rank) for rank in group]
    return [future.result() for future in futures]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_parts_of_any_width_are_put_side_by_side(ranks, dtype):
    widths = [3, 0, 2]
    whole = torch.arange(20).reshape(4, 5).to(dtype)
    parts = whole.split(widths, dim=1)
    for found in together(ranks, lambda rank: rank.gather(parts[rank.rank], widths)):
        assert torch.equal(found, whole)


def test_no_rows_are_gathered_without_an_exchange(ranks):
    assert ranks[0].gather(torch.empty(0, 3), [3, 1, 2]).shape == (0, 6)


def test_all_have_the_values_of_rank_0(ranks):
    own = [torch.full((2, 3), rank.rank, dtype=torch.int64) for rank in ranks]
    own[0] += 7
    for found in together(ranks, lambda rank: rank.broadcast(own[rank.rank])):
        assert found.tolist() == [[7] * 3] * 2


def test_who_waits_for_a_rank_that_aborts_gets_an_error(monkeypatch):
    second = torch.distributed.default_pg_timeout.resolution * 1_000_000
    monkeypatch.setattr("forerun.ops.collectives.CONNECT_TIME", 5 * second)  # gloo may tell no earlier

    def call(rank):
        if rank.rank == 2:
            return rank.abort()
        with pytest.raises(WorkerError, match=f"rank {rank.rank} has lost another rank"):
            rank.gather(torch.zeros(2, 1), [1, 1, 1])
        return rank.abort()

    together(connected(), call)


def test_a_rank_that_finds_no_rank_0_says_so(monkeypatch):
    monkeypatch.setattr(
        "forerun.ops.collectives.CONNECT_TIME", torch.distributed.default_pg_timeout.resolution * 200_000
    )
    port = TorchCollectives(CPU, rank=0, num_ranks=2).port  # which is free again
    with pytest.raises(WorkerError, match=f"rank 1 finds no rank 0 at port {port}"):
        TorchCollectives(CPU, rank=1, num_ranks=2, port=port)
