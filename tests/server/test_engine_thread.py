"""The engine's thread, without HTTP around it."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest

from forerun import SamplingParams
from forerun.core.outputs import RequestOutput, StreamDelta
from forerun.engine.client import EngineRequest
from forerun.engine.engine import Engine
from forerun.errors import DeviceLostError, StepError, WorkerError
from forerun.server.engine_thread import EngineEndedError, EngineError, EngineThread
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
async def running(llm, observed=None, **options):
    def observe(deltas, finished, now):
        if observed is not None:
            observed.extend(finished)

    engine = EngineThread(llm.engine, **({"observe": observe} | options))
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def accepted(engine, request_id, sampling=GREEDY):
    """The record of a request that the engine has accepted."""
    request = EngineRequest(request_id=request_id, prompt_ids=PROMPT, sampling=sampling)
    engine.engine.accept(request)
    return request


def submit(engine, request_id, sampling=GREEDY, **options):
    reader = Reader(**options)
    engine.submit([accepted(engine, request_id, sampling)], reader)
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
            other = submit(engine, "b")
            await other.ended.wait()
            return idle, reader.events

    idle, events = asyncio.run(run())
    assert idle
    assert all(isinstance(event, StreamDelta) for event in events)
    assert sum(len(event.token_ids) for event in events) < LONG.max_tokens
    assert [output.outputs[0].finish_reason for output in observed] == ["abort", "length"]
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


def test_an_engine_ends_with_a_process_that_computes_a_part_of_its_model():
    llm = tiny_llm()

    def fail():
        raise WorkerError("rank 1 (process 7) was killed (SIGKILL)")

    llm.engine.step = fail

    async def run():
        async with running(llm) as engine:
            failed = submit(engine, "a")
            await failed.ended.wait()
            with pytest.raises(EngineEndedError, match="restart the server"):
                engine.submit([accepted(engine, "b")], Reader())
            return failed.events[-1], engine.failure

    failed, failure = asyncio.run(run())
    assert isinstance(failed, EngineEndedError)
    assert "SIGKILL" not in str(failed), "the log has the reason"
    assert failure == "the engine has ended after an error"


def test_an_engine_that_cannot_be_cleared_ends_and_says_so():
    llm = tiny_llm()
    all_submitted = threading.Event()

    def fail(*_args):
        all_submitted.wait(10)
        raise RuntimeError("broken")

    llm.engine.step = llm.engine.abort = fail

    async def run():
        async with running(llm) as engine:
            readers = [submit(engine, name) for name in "abc"]
            all_submitted.set()
            await asyncio.gather(*(reader.ended.wait() for reader in readers))
            assert all(isinstance(reader.events[-1], EngineError) for reader in readers)
            assert engine.failure == "the engine has ended after an error"
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
                engine.submit([accepted(engine, str(place))], reader)

            await asyncio.gather(*(asyncio.to_thread(put, *one) for one in enumerate(readers)))
            await asyncio.gather(*(reader.ended.wait() for reader in readers))
            return [reader.events[-1].outputs[0].token_ids for reader in readers]

    assert all(found == expected.outputs[0].token_ids for found in asyncio.run(run()))


# --- nothing ends the thread ----------------------------------------------------------------------


class LongStep:
    """Holds the engine's next step until `release`; `began` is set when it is in it."""

    def __init__(self, llm):
        self.began, self._goes_on, self._step = threading.Event(), threading.Event(), llm.engine.step
        llm.engine.step = self

    def __call__(self):
        self.began.set()
        assert self._goes_on.wait(10)
        return self._step()

    def release(self):
        self._goes_on.set()


async def serves(engine, request_id="afterwards"):
    """Whether a request is served to its end."""
    reader = submit(engine, request_id)
    await asyncio.wait_for(reader.ended.wait(), 10)
    return isinstance(reader.events[-1], RequestOutput) and engine.failure is None


def test_a_question_given_up_during_a_long_step_does_not_end_the_engine(caplog):
    llm = tiny_llm()
    step = LongStep(llm)

    async def run():
        async with running(llm) as engine:
            running_one = submit(engine, "a")
            await asyncio.to_thread(step.began.wait, 10)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(engine.ask(Engine.snapshot), 0.01)
            step.release()
            await asyncio.wait_for(running_one.ended.wait(), 10)
            return isinstance(running_one.events[-1], RequestOutput) and await serves(engine)

    assert asyncio.run(run())
    assert caplog.records == []


def test_a_question_given_up_while_it_is_answered_does_not_end_the_engine(caplog):
    began, goes_on = threading.Event(), threading.Event()

    def question(_engine):
        began.set()
        return goes_on.wait(10)

    async def run():
        async with running(tiny_llm()) as engine:
            asking = asyncio.ensure_future(engine.ask(question))
            await asyncio.to_thread(began.wait, 10)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            goes_on.set()
            return await serves(engine)

    assert asyncio.run(run())
    assert caplog.records == []


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, asyncio.CancelledError])
def test_a_question_that_raises_raises_for_whoever_asks(error):
    def question(_engine):
        raise error("no")

    async def run():
        async with running(tiny_llm()) as engine:
            asking = asyncio.get_running_loop().run_in_executor(None, lambda: asyncio.run(asked(engine)))
            return await asking, await serves(engine)

    async def asked(engine):
        try:
            await engine.ask(question)
        except BaseException as raised:
            return type(raised)

    assert asyncio.run(run()) == (error, True)


def test_a_request_that_cannot_be_queued_fails_alone(caplog):
    llm = tiny_llm()
    queue = llm.engine.submit

    def failing(request_id):
        if request_id == "bad":
            raise RuntimeError("no")
        queue(request_id)

    llm.engine.submit = failing

    async def run():
        async with running(llm) as engine:
            other = submit(engine, "a")
            reader = Reader()
            engine.submit([accepted(engine, name) for name in ("good", "bad")], reader)
            await asyncio.wait_for(reader.ended.wait(), 10)
            await asyncio.wait_for(other.ended.wait(), 10)
            return reader.events, other.events[-1], await serves(engine)

    events, other, is_well = asyncio.run(run())
    assert [type(event) for event in events] == [EngineError]
    assert isinstance(other, RequestOutput)
    assert is_well
    assert [record.getMessage() for record in caplog.records] == ["a command to the engine failed; the engine goes on"]
    assert llm.engine.parts.pool.num_free == llm.engine.parts.pool.num_blocks


def test_an_abort_that_fails_does_not_end_the_engine():
    llm = tiny_llm()
    abort, failures = llm.engine.abort, []

    def failing_once(request_id):
        if not failures:
            failures.append(request_id)
            raise RuntimeError("no")
        return abort(request_id)

    llm.engine.abort = failing_once

    async def run():
        async with running(llm) as engine:
            submit(engine, "a", LONG)
            engine.abort(["a"])
            return await serves(engine)

    assert asyncio.run(run())
    assert failures == ["a"]


def test_metrics_that_cannot_be_counted_harm_nobody():
    def observe(*_step):
        raise RuntimeError("no")

    async def run():
        async with running(tiny_llm(), observe=observe) as engine:
            return await serves(engine)

    assert asyncio.run(run())


def test_a_step_that_hangs_is_reported_until_it_ends(caplog):
    llm = tiny_llm()
    step = LongStep(llm)

    async def run():
        async with running(llm, step_timeout=0.05) as engine:
            reader = submit(engine, "a")
            await asyncio.to_thread(step.began.wait, 10)
            await asyncio.sleep(0.1)
            hanging = engine.failure
            step.release()
            await asyncio.wait_for(reader.ended.wait(), 10)
            while engine.failure is not None:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.1)
            return hanging, engine.failure

    hanging, afterwards = asyncio.run(run())
    assert "--step-timeout" in hanging
    assert afterwards is None  # and an engine that waits for work does not hang
    assert "a step of the engine took" in caplog.text


def test_a_request_after_the_end_is_answered_with_the_reason():
    async def run():
        async with running(tiny_llm()) as engine:
            engine.stop()
            with pytest.raises(EngineEndedError, match="shutting down"):
                submit(engine, "a")

    asyncio.run(run())


def test_an_engine_without_work_whose_other_process_has_ended_says_so_and_takes_no_more(monkeypatch):
    monkeypatch.setattr("forerun.server.engine_thread.HEALTH_PERIOD_S", 0.01)
    llm = tiny_llm()

    def gone():
        raise WorkerError("rank 1 was killed")

    async def run():
        async with running(llm) as engine:
            await submit(engine, "a").ended.wait()
            await asyncio.sleep(0.05)
            well = engine.failure
            monkeypatch.setattr(llm.engine, "check_health", gone)
            while engine.is_running:
                await asyncio.sleep(0.001)
            with pytest.raises(EngineEndedError, match="restart the server"):
                submit(engine, "b")
            return well, engine.failure

    assert asyncio.run(run()) == (None, "the engine has ended after an error")


def test_a_step_that_never_ends_holds_up_no_stop(monkeypatch, caplog):
    monkeypatch.setattr("forerun.server.engine_thread.LAST_STEP_S", 0.05)
    llm = tiny_llm()
    step = LongStep(llm)

    async def run():
        async with running(llm) as engine:
            submit(engine, "a")
            await asyncio.to_thread(step.began.wait, 10)
            engine.stop()
            hangs = engine.is_running
            step.release()
            while engine.is_running:
                await asyncio.sleep(0.001)
            return hangs

    assert asyncio.run(run())
    (report,) = caplog.records
    assert (
        report.getMessage()
        == "the step that was running has not ended within 0.05 s; the engine's thread is left in it"
    )
    assert llm.engine.parts.pool.num_free == llm.engine.parts.pool.num_blocks


# --- the device ----------------------------------------------------------------------------------


def test_a_lost_device_ends_the_engine_and_is_reported_after_all_requests_know():
    llm = tiny_llm()
    lost, told = threading.Event(), []

    def lose():
        raise DeviceLostError("device: it computes no more (CUDA error: device-side assert triggered)")

    llm.engine.step = lose

    async def run():
        def when_lost(error):
            told.append(str(error))
            lost.set()

        async with running(llm, when_lost=when_lost) as engine:
            failed = submit(engine, "a")
            await failed.ended.wait()
            await asyncio.to_thread(lost.wait, 10)
            with pytest.raises(EngineEndedError, match="the device computes no more; the server ends"):
                engine.submit([accepted(engine, "b")], Reader())
            return failed.events[-1], engine.failure

    failed, failure = asyncio.run(run())
    assert isinstance(failed, EngineEndedError)
    assert "device-side" not in str(failed), "the log has the reason"
    assert failure == "the device is lost"
    assert told == ["device: it computes no more (CUDA error: device-side assert triggered)"]


def test_memory_that_a_step_lacks_fails_its_largest_request_alone():
    llm = tiny_llm()
    execute, submitted, calls = llm.executor.execute, threading.Event(), []

    def failing(plan):
        submitted.wait(10)
        calls.append(plan)
        if len(plan.sequences) > 1:
            raise StepError("device memory: a step did not fit")
        return execute(plan)

    llm.engine.parts.executor.execute = failing

    async def run():
        async with running(llm) as engine:
            readers = [submit(engine, name) for name in "ab"]
            submitted.set()
            await asyncio.gather(*(reader.ended.wait() for reader in readers))
            return [reader.events[-1] for reader in readers], engine.failure, await serves(engine)

    outputs, failure, is_well = asyncio.run(run())
    assert sorted(output.error or "" for output in outputs)[0] == ""
    assert "device memory: a step did not fit" in [output.error for output in outputs]
    assert failure is None
    assert is_well
