"""The shared memory of a group: messages arrive whole and in order, and nobody waits for a rank that is gone."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from forerun.errors import ConfigError, WorkerError
from forerun.ops.native.sharded import exchange as exchanges
from forerun.ops.native.sharded.exchange import Exchange, ExchangeSizes, Leader, make_shared_memory
from forerun.ops.native.sharded.messages import Drop
from tests.native import KERNELS, needs_kernels

pytestmark = [needs_kernels, pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux shares memory so")]
SIZES = ExchangeSizes(
    num_ranks=3,
    num_threads=1,
    max_rows=8,
    input_width=16,
    attended_width=16,
    gated_width=32,
    heads_width=0,
    vocab_size=64,
    head_rows=2,
    element_bytes=2,
    message_bytes=1 << 16,
)


@pytest.fixture
def ranks():
    """Three views of one memory, as three processes have them."""
    descriptor = make_shared_memory(SIZES.offsets()[1])
    kernels = next(iter(KERNELS.values()))
    try:
        yield [Exchange(kernels, descriptor, SIZES, rank=rank) for rank in range(SIZES.num_ranks)]
    finally:
        os.close(descriptor)


def received(rank, count):
    """The next messages of a rank, each finished before the next."""
    found = []
    while len(found) < count:
        message = rank.receive()
        if message is not None:
            found.append(message)
            rank.finish()
    return found


def test_every_rank_receives_every_message_in_order(ranks):
    messages = [{"number": i, "text": "x" * (37 * i)} for i in range(200)]
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(received, rank, len(messages)) for rank in ranks[1:]]
        for message in messages:
            ranks[0].post(message)
        assert [other.result(20) for other in others] == [messages, messages]


def test_rows_for_which_there_is_no_room_are_refused_before_they_are_written(ranks):
    with pytest.raises(ValueError, match="more rows than the exchange has room for"):
        ranks[0].post("rows", torch.ones(SIZES.max_rows + 1, SIZES.input_width))


def test_a_rank_that_sleeps_is_woken_by_a_message(ranks):
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(received, rank, 1) for rank in ranks[1:]]
        time.sleep(0.1)  # far beyond the spins
        ranks[0].post("late")
        assert [other.result(20) for other in others] == [["late"], ["late"]]


def test_where_no_message_comes_a_rank_gets_none_after_a_while(ranks, monkeypatch):
    monkeypatch.setattr(exchanges, "RECEIVE_MS", 10)
    assert ranks[1].receive() is None


def test_a_message_waits_for_the_ranks_that_have_not_finished_the_one_before(ranks):
    ranks[0].post("first")
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(ranks[0].post, "second")
        assert received(ranks[1], 1) == ["first"]
        time.sleep(0.05)
        assert not second.done()
        assert received(ranks[2], 1) == ["first"]
        second.result(20)
    assert received(ranks[1], 1) == received(ranks[2], 1) == ["second"]


def test_the_end_of_a_rank_ends_every_wait(ranks):
    ranks[0].post("first")
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(ranks[0].post, "second"), pool.submit(received, ranks[1], 2)]
        time.sleep(0.05)
        ranks[0].end(2)
        for wait in waits:
            with pytest.raises(WorkerError):
                wait.result(20)


def test_a_message_without_room_is_refused(ranks):
    with pytest.raises(ValueError, match="larger than its room"):
        ranks[0].post("x" * SIZES.message_bytes)


def test_rows_go_with_a_message(ranks):
    rows = torch.randn(4, SIZES.input_width)
    ranks[0].post("rows", rows)
    address = ranks[1].struct.update - ranks[1].struct.flags
    found = torch.frombuffer(ranks[1]._memory, dtype=torch.float32, count=rows.numel(), offset=address)
    assert torch.equal(found.view_as(rows), rows)


def test_what_is_lent_is_borrowed_whole_and_taken_back(ranks):
    contents = [os.urandom(3 << 20), b"", b"short"]
    places = ranks[0].lend(contents)
    assert [ranks[1 + i % 2].borrow(place) for i, place in enumerate(places)] == contents
    before = os.fstat(ranks[0]._descriptor).st_size
    ranks[0].take_back()
    assert os.fstat(ranks[0]._descriptor).st_size == SIZES.offsets()[1] < before


def test_what_is_dropped_is_told_before_the_next_call(ranks):
    leader = Leader(ranks[0])
    number = leader.new_number()
    assert leader.new_number() != number
    leader.drop(number)
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(received, rank, 2) for rank in ranks[1:]]
        with leader as exchange:
            exchange.post("next")
        assert [other.result(20) for other in others] == [[Drop(number), "next"]] * 2


def test_a_rank_that_ended_meanwhile_fails_the_next_call_and_leaves_the_leader_free(ranks):
    leader = Leader(ranks[0])
    leader.drop(7)
    leader.exchange.end(1)
    for _ in range(2):
        with pytest.raises(WorkerError, match="load the model again"), leader:
            ranks[0].post("more")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(leader.lock.acquire, timeout=5).result(20), "no call holds the lock"


def test_buffers_neither_overlap_nor_share_a_cache_line():
    offsets, num_bytes = SIZES.offsets()
    assert all(offset % exchanges.ALIGNMENT == 0 for offset in offsets.values())
    bounds = [*offsets.values(), num_bytes]
    assert bounds == sorted(bounds)
    assert offsets["attended"] - offsets["update"] == SIZES.max_rows * SIZES.input_width * 4


def test_a_failed_call_ends_the_group_and_says_why_later_ones_fail(ranks):
    leader = Leader(ranks[0])
    with pytest.raises(KeyboardInterrupt), leader:
        raise KeyboardInterrupt
    with (
        pytest.raises(WorkerError, match=r"rank 0 was interrupted \(KeyboardInterrupt\).*load the model again"),
        leader,
    ):
        ranks[0].post("more")


def test_a_step_that_finds_no_memory_ends_the_group_with_what_to_lower(ranks):
    leader = Leader(ranks[0])
    with pytest.raises(torch.OutOfMemoryError), leader:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB")
    with (
        pytest.raises(WorkerError, match=r"rank 0: device memory: a step did not fit \(2.50 GiB.*lower gpu_memory"),
        leader,
    ):
        ranks[0].post("more")


def test_memory_that_the_system_does_not_give_is_an_error_with_its_size(monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(ConfigError, match=r"gives no 3 MiB of shared memory .*No space left.*max_num_batched_tokens"):
        make_shared_memory(3 << 20)


def test_a_system_without_nameless_memory_is_named(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(ConfigError, match="memfd_create, which only Linux has"):
        make_shared_memory(100)
