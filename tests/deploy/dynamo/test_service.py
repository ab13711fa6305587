"""What a worker answers: the engine's tokens in chunks, errors by whose mistake they are, and nothing left behind."""

from __future__ import annotations

import asyncio
import functools
import threading
from contextlib import asynccontextmanager, suppress

import pytest
from prometheus_client import generate_latest

from forerun import SamplingParams
from forerun.deploy.dynamo import prompt_lengths
from forerun.deploy.dynamo.prompt_lengths import PromptLengths
from forerun.deploy.dynamo.service import NUM_INTAKE_THREADS, TokenService
from forerun.engine.engine import Engine
from forerun.errors import RequestError
from forerun.server.engine_thread import EngineEndedError, EngineError
from tests.contract.drafters import NGRAM
from tests.contract.test_contract import assert_nothing_is_held
from tests.deploy.dynamo.sent import PROMPT, sent
from tests.engines import EOS, tiny_llm

LONG = list(range(20, 60))
PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "seed": 3}


def in_event_loop(test):
    """The test as a plain function."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))

    return run


@asynccontextmanager
async def serving(llm, folder=None):
    service = TokenService(llm, name="tiny", prompt_lengths=None if folder is None else PromptLengths(folder))
    service.start()
    try:
        yield service
    finally:
        service.close()


async def answer(service, request, request_id="some-id"):
    """The tokens, and the last chunk."""
    token_ids, chunk = [], {}
    async for chunk in service.generate(request, request_id):
        token_ids += chunk["token_ids"]
    return token_ids, chunk


def tokens_offline(token_ids=PROMPT, **settings):
    output = tiny_llm().generate([token_ids], SamplingParams(**settings), use_tqdm=False)[0]
    return output.outputs[0].token_ids


@in_event_loop
async def test_a_step_with_accepted_drafts_is_one_chunk():
    llm = tiny_llm(NGRAM, verifies_all=True)
    greedy = {"temperature": 0.0, "repetition_penalty": 0.01}  # says the same again and again
    request = sent(stop={"max_tokens": 40, "ignore_eos": True}, sampling=greedy)
    async with serving(llm) as service:
        chunks = [chunk async for chunk in service.generate(request, "a")]
    token_ids = [token_id for chunk in chunks for token_id in chunk["token_ids"]]
    assert token_ids == tokens_offline(**greedy, max_tokens=40, ignore_eos=True)
    assert max(len(chunk["token_ids"]) for chunk in chunks) > 1
    assert all(chunk["index"] == 0 for chunk in chunks)
    assert [chunk.get("finish_reason") for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert chunks[-1]["completion_usage"] == {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": 40,
        "total_tokens": len(PROMPT) + 40,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert_nothing_is_held(llm)


@in_event_loop
async def test_the_reason_of_an_end_says_whether_the_model_ended_the_text():
    async with serving(tiny_llm()) as service:
        bias = {"temperature": 0.0, "guided_decoding": None}
        ends = sent(stop={"max_tokens": 1}, sampling=bias | {"allowed_token_ids": [EOS]})
        stops = sent(stop={"max_tokens": 1, "stop_token_ids": [7]}, sampling=bias | {"allowed_token_ids": [7]})
        assert (await answer(service, ends))[1]["finish_reason"] == "eos"
        assert (await answer(service, stops))[1]["finish_reason"] == "stop"


@in_event_loop
async def test_logprobs_lie_beside_their_tokens():
    request = sent(stop={"max_tokens": 5}, sampling={"seed": 3}, output={"logprobs": 2})
    async with serving(tiny_llm()) as service:
        chunks = [chunk async for chunk in service.generate(request, "a")]
    for chunk in chunks:
        assert len(chunk["token_ids"]) == len(chunk["log_probs"]) == len(chunk["top_logprobs"])
        for row in chunk["top_logprobs"]:
            assert [one["rank"] for one in row] == [1, 2]
            assert row[0]["logprob"] >= row[1]["logprob"]


@pytest.mark.parametrize("num_written", [1, 5, 11])
@pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {"seed": 3}, PENALTIES], ids=["greedy", "seeded", "penalties"]
)
@in_event_loop
async def test_a_broken_streams_text_goes_on_at_another_worker(tmp_path, settings, num_written):
    """What the frontend does when a worker dies: all tokens come as the prompt, and the limits are lowered."""
    whole = tokens_offline(max_tokens=12, min_tokens=9, **settings)
    async with serving(tiny_llm(), tmp_path) as first, serving(tiny_llm(NGRAM), tmp_path) as second:
        stream = first.generate(sent(stop={"max_tokens": 12, "min_tokens": 9}, sampling=settings), "moving")
        written = []
        async for chunk in stream:
            written += chunk["token_ids"]
            if len(written) >= num_written:
                break
        await stream.aclose()  # the frontend got no end
        rest = sent(
            [*PROMPT, *written],
            stop={"max_tokens": 12 - len(written), "min_tokens": max(0, 9 - len(written))},
            sampling=settings,
        )
        assert written + (await answer(second, rest, "moving"))[0] == whole


@in_event_loop
async def test_a_text_without_a_seed_goes_on_too():
    request = sent(stop={"max_tokens": 12, "ignore_eos": True})
    async with serving(tiny_llm()) as service:
        whole = (await answer(service, request, "a"))[0]
        assert whole != (await answer(service, request, "b"))[0]
        moved = sent([*PROMPT, *whole[:5]], stop={"max_tokens": 7, "ignore_eos": True})
        assert whole[:5] + (await answer(service, moved, "a"))[0] == whole


@in_event_loop
async def test_a_stream_that_broke_after_its_last_token_only_ends():
    async with serving(tiny_llm()) as service:
        token_ids, last = await answer(service, sent(stop={"max_tokens": 0}))
    assert (token_ids, last["finish_reason"]) == ([], "length")


@in_event_loop
async def test_penalties_that_count_need_a_place_to_note_the_prompt():
    async with serving(tiny_llm()) as service:
        with pytest.raises(RequestError, match="--workers-folder"):
            await answer(service, sent(sampling=PENALTIES))
        assert len((await answer(service, sent(stop={"max_tokens": 3}, sampling={"repetition_penalty": 1.2})))[0]) == 3


@in_event_loop
async def test_a_request_that_does_not_fit_is_refused_and_leaves_nothing():
    llm = tiny_llm()
    async with serving(llm) as service:
        for request in (sent([]), sent([1000]), sent([1] * 128), sent(sampling={"n": 2})):
            with pytest.raises(RequestError):
                await answer(service, request)
        assert len((await answer(service, sent(stop={"max_tokens": 3})))[0]) == 3
    assert_nothing_is_held(llm)


@in_event_loop
async def test_a_request_that_is_aborted_while_it_is_taken_in_never_runs(monkeypatch):
    llm, accepting = tiny_llm(), threading.Event()
    accept = type(llm.engine).accept

    def slow(engine, request):
        accepting.wait(10)
        accept(engine, request)

    monkeypatch.setattr(type(llm.engine), "accept", slow)
    async with serving(llm) as service:
        reading = asyncio.ensure_future(answer(service, sent(stop={"max_tokens": 100})))
        await asyncio.sleep(0.01)
        service.abort("some-id")
        accepting.set()
        token_ids, last = await reading
        assert (token_ids, last["finish_reason"]) == ([], "cancelled")
        assert len((await answer(service, sent(stop={"max_tokens": 3}), "another-id"))[0]) == 3
    assert_nothing_is_held(llm)
    assert llm.engine.stats.num_generation_tokens == 3


@pytest.mark.parametrize("how", ["abort", "cancel"])
@in_event_loop
async def test_of_requests_that_nobody_wants_any_more_no_other_is_taken_in(how, monkeypatch):
    """The fault: grammars of clients that had long gone were compiled one after the other, before anybody else's."""
    llm, may_go_on, begun = tiny_llm(), threading.Event(), []
    accept = llm.engine.accept

    def slow(request):
        begun.append(request)
        may_go_on.wait(10)
        accept(request)

    monkeypatch.setattr(llm.engine, "accept", slow)
    async with serving(llm) as service:
        requests = {f"{n}": sent(stop={"max_tokens": 100}) for n in range(NUM_INTAKE_THREADS + 6)}
        reading = {name: asyncio.ensure_future(answer(service, one, name)) for name, one in requests.items()}
        while len(begun) < NUM_INTAKE_THREADS:
            await asyncio.sleep(0.001)
        for name, task in reading.items():
            task.cancel() if how == "cancel" else service.abort(name)
        await asyncio.sleep(0.01)
        may_go_on.set()
        await asyncio.gather(*reading.values(), return_exceptions=True)
        assert len((await answer(service, sent(stop={"max_tokens": 3}), "another-id"))[0]) == 3
        while llm.engine._accepted:
            await asyncio.sleep(0.001)
    assert len(begun) == NUM_INTAKE_THREADS + 1
    assert_nothing_is_held(llm)


@pytest.mark.parametrize("how", ["abort", "close", "cancel"])
@in_event_loop
async def test_a_request_that_nobody_wants_any_more_ends_in_the_engine(how):
    llm = tiny_llm()
    async with serving(llm) as service:
        stream = service.generate(sent(stop={"max_tokens": 100, "ignore_eos": True}), "some-id")
        assert (await anext(stream))["token_ids"]
        if how == "abort":
            service.abort("another-id")
            service.abort("some-id")
            assert [chunk async for chunk in stream][-1]["finish_reason"] == "cancelled"
        elif how == "close":
            await stream.aclose()
        else:
            task = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            await stream.aclose()
        assert len((await answer(service, sent(stop={"max_tokens": 3}), "another-id"))[0]) == 3
    assert_nothing_is_held(llm)


@pytest.mark.parametrize(("how", "is_kept"), [("abort", False), ("close", True)])
@in_event_loop
async def test_an_aborted_text_is_forgotten_and_a_closed_stream_may_go_on_elsewhere(
    tmp_path, monkeypatch, how, is_kept
):
    monkeypatch.setattr(prompt_lengths, "KEPT_AFTER_END_S", -1.0)
    request = sent(stop={"max_tokens": 100, "ignore_eos": True}, sampling=PENALTIES)
    async with serving(tiny_llm(), tmp_path) as service:
        stream = service.generate(request, "some-id")
        await anext(stream)
        (note,) = tmp_path.iterdir()
        if how == "abort":
            service.abort("some-id")
        await stream.aclose()
        await answer(service, sent(stop={"max_tokens": 1}, sampling=PENALTIES), "another-id")
    assert note.exists() == is_kept


@in_event_loop
async def test_a_request_that_is_refused_leaves_no_note(tmp_path, monkeypatch):
    monkeypatch.setattr(prompt_lengths, "KEPT_AFTER_END_S", -1.0)
    llm = tiny_llm()
    async with serving(llm, tmp_path) as service:
        with pytest.raises(RequestError):
            await answer(service, sent([3] * (llm.max_model_len + 1), sampling=PENALTIES))
        assert len(list(tmp_path.iterdir())) == 1
        await asyncio.sleep(0.02)  # longer than the clock of files stands
        await answer(service, sent(stop={"max_tokens": 1}, sampling=PENALTIES), "another-id")
    assert len(list(tmp_path.iterdir())) == 1, "that of the other one"


@in_event_loop
async def test_an_id_that_a_client_gives_to_two_requests_mixes_nothing_up(tmp_path):
    settings = PENALTIES | {"temperature": 0.8}
    async with serving(tiny_llm(), tmp_path) as service:
        for prompt in (PROMPT, LONG):
            token_ids, _ = await answer(service, sent(prompt, stop={"max_tokens": 6}, sampling=settings))
            assert token_ids == tokens_offline(prompt, **settings, max_tokens=6)


@in_event_loop
async def test_a_step_that_fails_is_an_error_of_the_server(monkeypatch):
    llm = tiny_llm()
    async with serving(llm) as service:
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "step", lambda self: (_ for _ in ()).throw(RuntimeError("boom")))
            with pytest.raises(EngineError):
                await answer(service, sent(stop={"max_tokens": 3}))
        assert len((await answer(service, sent(stop={"max_tokens": 3})))[0]) == 3


@in_event_loop
async def test_after_its_end_a_service_takes_nothing_and_ends_what_runs():
    llm = tiny_llm()
    async with serving(llm) as service:
        stream = service.generate(sent(stop={"max_tokens": 100, "ignore_eos": True}), "some-id")
        await anext(stream)
        await asyncio.to_thread(service._engine.stop)
        with pytest.raises(EngineEndedError):
            [chunk async for chunk in stream]
        with pytest.raises(EngineEndedError):
            await answer(service, sent())
    assert_nothing_is_held(llm)


@in_event_loop
async def test_the_router_hears_of_the_cache_and_the_load():
    llm, stored, loads = tiny_llm(), [], []

    class Router:
        def publish_stored(self, token_ids, num_block_tokens, block_hashes, parent_hash=None, cache_salt=None):
            stored.append((token_ids, cache_salt))

        def publish_removed(self, block_hashes):
            raise AssertionError("nothing is evicted")

    async with serving(llm) as service:
        service.events.attach(Router())
        service.report_load_to(lambda *load: loads.append(load))
        token_ids, last = await answer(service, sent(LONG, stop={"max_tokens": 8}, routing={"cache_salt": "mine"}))
        (first, salt), *_ = stored
        assert (first[: len(LONG)], salt) == (LONG, "mine")
        assert [token_id for some, _ in stored for token_id in some] == [*LONG, *token_ids][: len(LONG) + 4]
        num_blocks = llm.engine.parts.pool.num_blocks
        while loads[-1][0]:  # the last report is on its way
            await asyncio.sleep(0.001)
        assert loads[0][0] >= len(LONG) // 4
        assert loads[-1] == (0, num_blocks, 0.0)
        assert last["completion_usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        again = (await answer(service, sent(LONG, stop={"max_tokens": 8}, routing={"cache_salt": "mine"})))[1]
        assert again["completion_usage"]["prompt_tokens_details"] == {"cached_tokens": 36}
        while loads[-1][0] or len({load[2] for load in loads}) < 2:
            await asyncio.sleep(0.001)
        assert loads[-1][2] == pytest.approx(36 / 80)


@in_event_loop
async def test_metrics_have_vllms_names():
    async with serving(tiny_llm()) as service:
        await answer(service, sent(stop={"max_tokens": 3}))
        text = (await asyncio.to_thread(generate_latest, service.registry)).decode()
    assert 'vllm:generation_tokens_total{engine="0",model_name="tiny"} 3.0' in text
    assert 'vllm:time_to_first_token_seconds_count{engine="0",model_name="tiny"} 1.0' in text
