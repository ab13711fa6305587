"""What passes between an engine and its user can pass between two processes."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from forerun import SamplingParams
from forerun.engine.client import EngineRequest
from forerun.errors import RequestError
from tests.contract.drafters import NGRAM
from tests.contract.test_contract import PROMPTS
from tests.engines import tiny_llm
from tests.executor.simulations import assert_nothing_is_held, drain, run, simulated_engine

SAMPLING = SamplingParams(seed=3, max_tokens=12, ignore_eos=True, stop_token_ids=[4])


def serve(connection):
    """An engine in a process of its own; commands come and answers go as bytes."""
    engine = simulated_engine(rates=[0.8, 0.5])
    while True:
        command, *arguments = connection.recv()
        if command == "end":
            return
        try:
            connection.send(getattr(engine, command)(*arguments))
        except RequestError as error:
            connection.send(error)


@pytest.fixture
def ask():
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=serve, args=(there,), daemon=True)
    process.start()

    def ask(*command):
        here.send(command)
        assert here.poll(20)
        return here.recv()

    yield ask
    here.send(("end",))
    process.join(20)


def request(request_id, prompt, sampling=SAMPLING):
    return EngineRequest(request_id=request_id, prompt_ids=prompt, sampling=sampling)


def test_an_engine_in_another_process_gives_the_texts_that_it_gives_here(ask):
    expected = run(simulated_engine(), PROMPTS[:8], SAMPLING)
    finished, texts = {}, {}
    for i, prompt in enumerate(PROMPTS[:8]):
        assert ask("accept", request(str(i), prompt)) is None
        assert ask("submit", str(i)) is None
    while len(finished) < 8:
        output = ask("step")
        finished |= {one.request_id: one for one in output.finished}
        for delta in output.deltas:
            texts.setdefault(delta.request_id, []).extend(delta.token_ids)
    for i, plain in enumerate(expected):
        assert finished[str(i)].outputs[0].token_ids == plain.outputs[0].token_ids == texts[str(i)]
    snapshot = ask("snapshot")
    assert snapshot.stats.num_generation_tokens == sum(map(len, texts.values()))
    assert {metric.name for metric in snapshot.metrics()} >= {"vllm:generation_tokens", "vllm:kv_cache_usage_perc"}


def test_a_request_that_does_not_fit_is_refused_across_the_border_and_leaves_nothing(ask):
    assert isinstance(ask("accept", request("a", [1, 2, 1000])), RequestError)
    assert ask("accept", request("a", [1, 2])) is None
    assert isinstance(ask("accept", request("a", [3])), RequestError), "the id is in use"
    assert ask("withdraw", "a") is None
    assert ask("accept", request("a", [3])) is None
    assert ask("abort", "a") is None, "it was not submitted"
    assert not ask("step").deltas


def test_events_are_records_that_no_later_step_changes():
    llm = tiny_llm(NGRAM)
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    llm.engine.add_request("a", [7, 8, 9] * 5, sampling)
    given, kept = [], []
    while llm.engine.has_work:
        output = llm.engine.step()
        given.append(output)
        kept.append(pickle.dumps(output.deltas))
    assert [pickle.dumps(output.deltas) for output in given] == kept
    first = given[0].deltas[0]
    assert first.prompt_logprobs == given[-1].finished[0].prompt_logprobs
    assert all(delta.prompt_logprobs is None for output in given[1:] for delta in output.deltas)


def test_two_threads_that_accept_one_id_get_one_request_between_them():
    engine = simulated_engine()

    def accept(_):
        try:
            engine.accept(EngineRequest(request_id="a", prompt_ids=[1, 2], sampling=SamplingParams(n=3)))
        except RequestError:
            return 0
        return 1

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(accept, range(64))) == 1
    engine.withdraw("a")
    assert_nothing_is_held(engine)


def test_an_id_that_is_withdrawn_while_its_request_is_prepared_belongs_to_the_next_request_alone():
    engine = simulated_engine()
    prepare, entered, go_on = engine.parts.executor.prepare, threading.Event(), threading.Event()

    def prepare_slowly(spec):
        prepare(spec)
        if spec.prompt_ids == [1, 1]:
            entered.set()
            assert go_on.wait(20)

    engine.parts.executor.prepare = prepare_slowly
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(engine.accept, request("a", [1, 1]))
        assert entered.wait(20)
        engine.withdraw("a")
        engine.accept(request("a", [2, 2]))
        go_on.set()
        first.result(20)
    engine.submit("a")
    assert drain(engine)["a"].prompt_token_ids == [2, 2]
    assert_nothing_is_held(engine)
