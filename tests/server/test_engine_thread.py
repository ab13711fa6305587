"""The engine's thread, without HTTP around it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from forerun import SamplingParams
from forerun.core.outputs import RequestOutput, StreamDelta
from forerun.server.engine_thread import EngineError, EngineThread
from tests.contract.drafters import NGRAM
from tests.engines import tiny_llm

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


class Reader:
    """Keeps what comes, and says when the end has come."""

    def __init__(self, *, streams=True):
        self.streams, self.events, self.ended = streams, [], asyncio.Event()

    def take(self, event):
        self.events.append(event)
        if not isinstance(event, StreamDelta):
            self.ended.set()


@asynccontextmanager
async def running(llm, observed=None):
    engine = EngineThread(llm.engine, observe=lambda output, now: observed is not None and observed.append(output))
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def submit(engine, request_id, sampling=GREEDY, **options):
    reader = Reader(**options)
    engine.submit([engine.engine.accept(request_id, PROMPT, sampling)], reader)
    return reader


def test_a_request_gets_its_deltas_and_its_output():
    llm = tiny_llm(NGRAM)
    (expected,) = tiny_llm().generate([PROMPT], GREEDY, use_tqdm=False)

    async def run():
        async with running(llm) as engine:
            streamed, whole = submit(engine, "a"), submit(engine, "b", streams=False)
            await asyncio.gather(streamed.ended.wait(), whole.ended.wait())
            return streamed.events, whole.events

    (*deltas, output), (only,) = asyncio.run(run())
    assert [token for delta in deltas for token in delta.token_ids] == expected.outputs[0].token_ids
    assert output.outputs[0].token_ids == only.outputs[0].token_ids == expected.outputs[0].token_ids


def test_an_aborted_request_takes_part_in_no_further_step():
    llm = tiny_llm()
    observed = []

    async def run():
        async with running(llm, observed) as engine:
            reader = submit(engine, "a", LONG)
            while not reader.events:
                await asyncio.sleep(0.001)
            engine.abort(["a", "never was"])
            idle = await engine.ask(lambda engine: not engine.has_work)
            count = len(reader.events)
            await asyncio.sleep(0.02)
            return idle, len(reader.events) - count

    idle, num_late = asyncio.run(run())
    assert idle
    assert num_late == 0
    assert [output.finished[0].outputs[0].finish_reason for output in observed if output.finished] == ["abort"]
    assert llm.engine.parts.pool.num_free == llm.engine.parts.pool.num_blocks


def test_a_failed_step_is_survived():
    llm = tiny_llm()
    step, calls = llm.engine.step, []

    def failing():
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return step()

    llm.engine.step = failing

    async def run():
        async with running(llm) as engine:
            failed = submit(engine, "a")
            await failed.ended.wait()
            served = submit(engine, "b")
            await served.ended.wait()
            return failed.events[-1], served.events[-1], engine.failure

    failed, served, failure = asyncio.run(run())
    assert isinstance(failed, EngineError)
    assert "out of memory" not in str(failed)
    assert isinstance(served, RequestOutput)
    assert failure is None


def test_an_engine_that_cannot_be_cleared_ends_and_says_so():
    llm = tiny_llm()

    def fail(*_args):
        raise RuntimeError("broken")

    llm.engine.step = llm.engine.abort = fail

    async def run():
        async with running(llm) as engine:
            readers = [submit(engine, name) for name in "abc"]
            await asyncio.gather(*(reader.ended.wait() for reader in readers))
            assert all(isinstance(reader.events[-1], EngineError) for reader in readers)
            assert engine.failure is not None
            with pytest.raises(EngineError):
                submit(engine, "d")
            with pytest.raises(EngineError):
                await engine.ask(lambda engine: engine.has_work)

    asyncio.run(run())


def test_stopping_aborts_what_runs():
    llm = tiny_llm()

    async def run():
        async with running(llm) as engine:
            reader = submit(engine, "a", LONG)
            while not reader.events:
                await asyncio.sleep(0.001)
        await asyncio.wait_for(reader.ended.wait(), 5)
        return reader.events[-1]

    assert isinstance(asyncio.run(run()), EngineError)
    assert llm.engine.parts.pool.num_free == llm.engine.parts.pool.num_blocks


def test_a_question_that_fails_harms_nobody():
    llm = tiny_llm()

    async def run():
        async with running(llm) as engine:
            with pytest.raises(ZeroDivisionError):
                await engine.ask(lambda engine: 1 // 0)
            assert await engine.ask(lambda engine: engine.has_work) is False

    asyncio.run(run())


def test_requests_may_be_accepted_from_many_threads():
    llm = tiny_llm(NGRAM)
    (expected,) = tiny_llm().generate([PROMPT], GREEDY, use_tqdm=False)

    async def run():
        async with running(llm) as engine:
            readers = [Reader(streams=False) for _ in range(40)]

            def put(place, reader):
                engine.submit([engine.engine.accept(str(place), PROMPT, GREEDY)], reader)

            await asyncio.gather(*(asyncio.to_thread(put, *one) for one in enumerate(readers)))
            await asyncio.gather(*(reader.ended.wait() for reader in readers))
            return [reader.events[-1].outputs[0].token_ids for reader in readers]

    assert all(found == expected.outputs[0].token_ids for found in asyncio.run(run()))
