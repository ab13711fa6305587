"""Prompts are read elsewhere only as far ahead as there will soon be room for their KV; the others wait unread."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from forerun import SamplingParams
from forerun.deploy.disaggregated.engine import DisaggregatedEngine
from forerun.deploy.disaggregated.prefill_client import Arrival
from forerun.engine.client import EngineRequest
from forerun.errors import RequestError
from forerun.kv.transfer import TransferredKV
from tests.executor.simulations import assert_nothing_is_held, simulated_engine

BLOCK = 4
SHORT = BLOCK  # tokens of prompts that are not sent
NUM_BLOCKS = 64  # of which prompts that are read ahead may fill 16
NUM_AHEAD = 3  # prompts of five blocks
SAMPLING = SamplingParams(max_tokens=3, ignore_eos=True)


class Reader:
    """Reads prompts when it is told to; `asked` has them in their order."""

    def __init__(self):
        self.is_over = False
        self.asked = {}
        self._unread, self._arrivals = [], []

    def read(self, request_id, token_ids, cache_salt):
        self.asked[request_id] = token_ids
        self._unread.append((request_id, token_ids, cache_salt))

    def cancel(self, request_id):
        self._unread = [one for one in self._unread if one[0] != request_id]

    def take(self, timeout):
        return self._arrivals.pop(0) if self._arrivals else None

    def go_on(self, num_prompts=1):
        for request_id, token_ids, salt in self._unread[:num_prompts]:
            whole = tuple(token_ids[: len(token_ids) // BLOCK * BLOCK])
            kv = TransferredKV(token_ids=whole, cache_salt=salt, block_size=BLOCK, caches=())
            self._arrivals.append(Arrival(request_id, kv))
        del self._unread[:num_prompts]

    def end(self):
        self.is_over = True
        self._arrivals += [Arrival(request_id, None, "it is gone") for request_id, _, _ in self._unread]


@pytest.fixture
def reader():
    return Reader()


@pytest.fixture
def engine(reader):
    own = simulated_engine(num_blocks=NUM_BLOCKS, block_size=BLOCK)
    return DisaggregatedEngine(own, reader, max_local_prefill_length=SHORT)


def prompt(number, num_blocks=5):
    """Full blocks that no other number's prompt has, and a token."""
    return [(number + place) % 89 + 6 for place in range(num_blocks * BLOCK + 1)]


def submit(engine, name, prompt_ids, sampling=SAMPLING):
    engine.accept(EngineRequest(request_id=name, prompt_ids=prompt_ids, sampling=sampling))
    engine.submit(name)


def submit_many(engine, num_prompts):
    for number in range(num_prompts):
        submit(engine, f"{number}", prompt(number))


def names(*numbers):
    return [f"{number}" for number in numbers]


def ended(engine, num_steps=50):
    return [output.request_id for _ in range(num_steps) for output in engine.step().finished]


def test_no_more_prompts_are_asked_for_than_fill_a_quarter_of_the_memory_and_these_in_their_order(engine, reader):
    submit_many(engine, 8)
    assert list(reader.asked) == names(*range(NUM_AHEAD))
    assert engine.snapshot().state.num_waiting == 8
    engine.step()
    assert len(reader.asked) == NUM_AHEAD
    reader.go_on(2)
    engine.step()
    assert list(reader.asked) == names(*range(NUM_AHEAD + 2))


def test_kv_that_waits_for_memory_counts_and_nobody_waits_for_ever(engine, reader):
    pool = engine._engine.parts.pool
    submit(engine, "runs", prompt(0, 0), SamplingParams(max_tokens=100, ignore_eos=True))
    engine.step()
    held = pool.take(pool.num_free - BLOCK)
    submit_many(engine, 8)
    for _ in range(BLOCK):
        reader.go_on(8)
        engine.step()
    assert len(reader.asked) == NUM_AHEAD
    assert engine.transfers.num_prompts == 0
    pool.give_back(held)
    found = []
    for _ in range(100):
        reader.go_on()
        found += ended(engine, 1)
    assert [name for name in found if name != "runs"] == names(*range(8))
    assert engine.transfers.num_prompts == 8
    assert_nothing_is_held(engine._engine)


def test_a_prompt_that_is_longer_is_read_alone_and_those_after_it_wait_for_it(engine, reader):
    submit(engine, "first", prompt(0))
    submit(engine, "long", prompt(20, 24))
    submit(engine, "last", prompt(50))
    assert list(reader.asked) == ["first"]
    for asked in (["first", "long"], ["first", "long", "last"]):
        reader.go_on()
        engine.step()
        assert list(reader.asked) == asked


def test_short_prompts_do_not_wait_for_those_that_are_unread(engine, reader):
    submit_many(engine, 8)
    submit(engine, "short", prompt(60, 1)[:SHORT])
    assert ended(engine) == ["short"]
    assert len(reader.asked) == NUM_AHEAD


def test_a_request_that_is_aborted_before_its_prompt_is_asked_for_is_forgotten(engine, reader):
    submit_many(engine, 6)
    engine.abort("3")
    engine.abort("0")  # is asked for, and leaves its room to another
    assert engine.snapshot().state.num_waiting == 4
    engine.step()
    assert list(reader.asked) == names(0, 1, 2, 4)
    for name in names(1, 2, 4, 5):
        engine.abort(name)
    assert not engine.has_work
    assert_nothing_is_held(engine._engine)


def test_a_prompt_that_is_cached_when_its_turn_comes_is_not_asked_for(engine, reader):
    submit_many(engine, 3)
    submit(engine, "again", prompt(0))
    reader.go_on()
    engine.step()
    reader.go_on(2)
    assert set(ended(engine)) == {*names(0, 1, 2), "again"}
    assert "again" not in reader.asked


def test_where_the_reader_ends_what_is_unread_is_read_here(engine, reader):
    submit_many(engine, 6)
    reader.end()
    assert ended(engine) == names(*range(6))
    assert len(reader.asked) == engine.transfers.num_failures == NUM_AHEAD


@pytest.mark.parametrize("fails", [False, True])
def test_an_id_that_is_withdrawn_while_its_request_is_prepared_belongs_to_the_next_request_alone(engine, reader, fails):
    executor = engine._engine.parts.executor
    prepare, entered, go_on = executor.prepare, threading.Event(), threading.Event()

    def prepare_slowly(spec):
        prepare(spec)
        if spec.prompt_ids == prompt(0):
            entered.set()
            assert go_on.wait(20)
            if fails:
                raise RequestError("it does not fit")

    executor.prepare = prepare_slowly
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(engine.accept, EngineRequest(request_id="a", prompt_ids=prompt(0), sampling=SAMPLING))
        assert entered.wait(20)
        engine.withdraw("a")
        engine.accept(EngineRequest(request_id="a", prompt_ids=prompt(1), sampling=SAMPLING))
        go_on.set()
        assert isinstance(first.exception(20), RequestError) == fails
    engine.submit("a")
    assert reader.asked == {"a": prompt(1)}
    engine.abort("a")
    assert_nothing_is_held(engine._engine)


def test_a_request_that_is_refused_leaves_the_one_that_has_its_id(engine, reader):
    engine.accept(EngineRequest(request_id="a", prompt_ids=prompt(0), sampling=SAMPLING))
    for refused in (prompt(1), [10**9]):
        with pytest.raises(RequestError, match="running already"):
            engine.accept(EngineRequest(request_id="a", prompt_ids=refused, sampling=SAMPLING))
    with pytest.raises(RequestError):
        engine.accept(EngineRequest(request_id="b", prompt_ids=[10**9], sampling=SAMPLING))
    engine.submit("a")
    with pytest.raises(RequestError, match="running already"):
        engine.accept(EngineRequest(request_id="a", prompt_ids=prompt(1), sampling=SAMPLING))
    engine.abort("a")
    assert reader.asked == {"a": prompt(0)}
    assert not engine._accepted
