"""Queues, clients that go away, and steps that fail, over HTTP."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from forerun.server.served_model import NUM_GRAMMAR_THREADS
from tests.contract.drafters import CASES, NGRAM
from tests.server.served import NAME, PROMPT, chat_llm, generate, served

LONG = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "temperature": 0}


class SlowSteps:
    """Makes each step of an engine take a while, and counts them."""

    def __init__(self, llm, seconds=0.02):
        self.num = 0
        self._step, self.seconds = llm.engine.step, seconds
        llm.engine.step = self

    def __call__(self):
        time.sleep(self.seconds)
        self.num += 1
        return self._step()


def until(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.002)


def begin(server, body, path="/v1/completions"):
    """A connection whose answer has begun (a stream) or not (a whole answer)."""
    connection = server.connection()
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection


def assert_nothing_is_left_of(body, path):
    """Begin a stream, go away, and see that the server lets go of it."""
    llm = chat_llm()
    SlowSteps(llm)
    with served(llm) as server:
        connection = begin(server, body | {"stream": True}, path)
        connection.getresponse().read(10)
        until(lambda: llm.engine.state.num_running == 1)
        connection.sock.close()
        connection.close()
        until(lambda: llm.engine.state.num_running == 0)
        assert server.model.admission.num_inside == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_sequences_within_a_step(stream):
    llm = chat_llm(NGRAM, max_model_len=250)
    steps = SlowSteps(llm)
    with served(llm) as server:
        connection = begin(server, LONG | {"stream": stream, "n": 3})
        until(lambda: steps.num > 3)
        pool = llm.engine.parts.pool
        assert pool.num_free < pool.num_blocks
        if stream:
            connection.getresponse().read(10)
        connection.sock.close()
        connection.close()
        at_close = steps.num
        until(lambda: pool.num_free == pool.num_blocks)
        assert steps.num <= at_close + 3  # one that ran, one that had begun before the news came, one to spare
        assert server.model.admission.num_inside == 0


def test_a_client_that_goes_away_while_it_waits_leaves_the_queue():
    llm = chat_llm(max_num_seqs=1)
    SlowSteps(llm)
    with served(llm) as server:
        first = begin(server, LONG | {"stream": True})
        first.getresponse().read(10)
        second = begin(server, LONG | {"stream": True})
        until(lambda: llm.engine.state.num_waiting == 1)
        second.sock.close()
        second.close()
        until(lambda: llm.engine.state.num_waiting == 0)
        assert llm.engine.state.num_running == 1
        first.sock.close()
        first.close()


def test_a_full_queue_is_429_and_running_requests_are_left_alone():
    llm = chat_llm(max_num_seqs=1)
    SlowSteps(llm, 0.01)
    with served(llm, max_queue=1) as server, ThreadPoolExecutor(2) as threads:
        body = LONG | {"max_tokens": 40}
        running = [threads.submit(server.post, "/v1/completions", body) for _ in range(2)]
        until(lambda: server.model.admission.num_inside == 2)
        status, headers, answer = server.send("POST", "/v1/completions", body)
        assert (status, answer["error"]["type"], answer["error"]["code"]) == (429, "rate_limit_error", "queue_full")
        assert int(headers["Retry-After"]) > 0
        expected = generate(PROMPT, max_tokens=40, ignore_eos=True).outputs[0].text
        assert [answer.result()["choices"][0]["text"] for answer in running] == [expected, expected]
        assert server.post("/v1/completions", body)["choices"]


def test_a_request_of_many_completions_fits_an_empty_server():
    with served(chat_llm(max_num_seqs=2), max_queue=0) as server:
        answer = server.post("/v1/completions", {"prompt": [PROMPT] * 10, "n": 4, "max_tokens": 2})
        assert len(answer["choices"]) == 40


def test_many_clients_at_once_get_what_they_would_get_alone(drafting):
    prompts = [f"hello {i} hello" for i in range(24)]
    with ThreadPoolExecutor(12) as threads:
        answers = list(
            threads.map(lambda p: drafting.post("/v1/completions", LONG | {"prompt": p, "max_tokens": 20}), prompts)
        )
    assert [answer["choices"][0]["text"] for answer in answers] == [
        generate(prompt, max_tokens=20, ignore_eos=True).outputs[0].text for prompt in prompts
    ]


def test_no_mixture_of_options_drafts_and_departures_hurts_the_server():
    source = random.Random(5)

    def any_body():
        choices = {
            "prompt": [PROMPT, "abc", [70, 71, 72], ["a", "hello hello hello"], [[1, 2, 3]] * 3],
            "n": [1, 1, 3],
            "temperature": [0, 0.7, 2.0],
            "top_k": [-1, 1, 5],
            "top_p": [1.0, 0.3],
            "min_p": [0.0, 0.2],
            "presence_penalty": [0.0, 2.0],
            "frequency_penalty": [0.0, -2.0],
            "repetition_penalty": [1.0, 1.5],
            "logit_bias": [None, {"70": 100, "71": -100}],
            "bad_words": [None, ["he", "l"]],
            "allowed_token_ids": [None, [70, 71, 78, 259], [70]],
            "logprobs": [None, 0, 5],
            "stop": [None, "l", ["C", "DE"]],
            "min_tokens": [0, 4],
            "max_tokens": [1, 5, 20],
            "ignore_eos": [False, True],
            "seed": [None, 1],
            "forerun": [None, {"speculation": "off"}, {"num_speculative_tokens": 1}, {"origins": True}],
        }
        return {name: source.choice(values) for name, values in choices.items()}

    bodies = [any_body() for _ in range(80)]
    with served(chat_llm(CASES["hybrid-self"], num_gpu_blocks_override=80, max_num_seqs=8)) as server:

        def ask(numbered):
            number, body = numbered
            if number % 7 == 0:
                begin(server, body | {"stream": True}).close()
                return 200
            return server.send("POST", "/v1/completions", body | {"stream": number % 2 == 0})[0]

        with ThreadPoolExecutor(8) as threads:
            assert set(threads.map(ask, enumerate(bodies))) <= {200, 400}
        assert server.send("GET", "/health")[0] == 200
        until(lambda: server.model.admission.num_inside == 0)


def test_one_request_of_many_completions_does_not_keep_others_out():
    llm = chat_llm(max_num_seqs=4)
    everything = {"prompt": [PROMPT] * 8, "n": 4, "max_tokens": 120, "ignore_eos": True, "temperature": 1}
    with served(llm) as server, ThreadPoolExecutor(1) as clients:
        large = clients.submit(server.post, "/v1/completions", everything)
        until(lambda: llm.engine.state.num_running == 4 and llm.engine.state.num_waiting >= 20)
        small = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 5, "ignore_eos": True})
        assert small["usage"]["completion_tokens"] == 5
        assert not large.done()
        assert len(large.result()["choices"]) == 32


def test_a_failed_step_ends_the_requests_in_flight_and_no_others():
    llm = chat_llm(NGRAM)
    steps = SlowSteps(llm)
    forward = llm.executor.forward
    fails = threading.Event()

    def failing(*args):
        if fails.is_set():
            fails.clear()
            raise RuntimeError("secret: no such file /private/path")
        return forward(*args)

    llm.executor.forward = failing
    with served(llm) as server, ThreadPoolExecutor(2) as threads:
        whole = threads.submit(server.send, "POST", "/v1/completions", LONG)
        streamed = threads.submit(server.stream, "/v1/completions", LONG)
        until(lambda: steps.num > 2 and llm.engine.state.num_running == 2)
        fails.set()
        status, _, answer = whole.result()
        assert (status, answer["error"]["type"]) == (500, "server_error")
        *chunks, last = streamed.result()
        assert chunks
        assert last["error"]["type"] == "server_error"
        assert "secret" not in str(answer) + str(last)
        assert server.send("GET", "/health")[0] == 200
        expected = generate(PROMPT, max_tokens=9, ignore_eos=True).outputs[0].text
        assert server.post("/v1/completions", LONG | {"max_tokens": 9})["choices"][0]["text"] == expected


def test_steps_that_keep_failing_make_the_server_ill_until_one_works():
    llm = chat_llm()
    forward = llm.executor.forward

    def failing(*_args):
        raise RuntimeError("no")

    with served(llm) as server:
        llm.executor.forward = failing
        for _ in range(3):
            assert server.send("POST", "/v1/completions", LONG)[0] == 500
        assert server.send("GET", "/health")[0] == 503
        llm.executor.forward = forward
        assert server.post("/v1/completions", LONG | {"max_tokens": 1})["choices"]
        assert server.send("GET", "/health")[0] == 200


def test_a_bug_in_the_server_is_500_without_its_reason(plain, monkeypatch, caplog):
    def fail(*_args):
        raise RuntimeError("secret")

    monkeypatch.setattr(plain.model, "check_name", fail)
    status, _, answer = plain.send("POST", "/v1/completions", {"prompt": "a"})
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert "secret" not in str(answer)
    until(lambda: any(record.exc_info and record.name == "uvicorn.error" for record in caplog.records))


def test_a_server_that_is_told_to_stop_lets_what_runs_finish():
    llm = chat_llm()
    steps = SlowSteps(llm, 0.01)
    with ThreadPoolExecutor(1) as threads:
        with served(llm) as server:
            answer = threads.submit(
                server.client().completions.create,
                model=NAME,
                prompt=PROMPT,
                max_tokens=50,
                extra_body={"ignore_eos": True},
            )
            until(lambda: steps.num > 2)
        assert answer.result().usage.completion_tokens == 50


@pytest.mark.parametrize("second_signal", [False, True])
def test_what_does_not_finish_in_time_is_cut_off_with_an_error(second_signal, caplog):
    llm = chat_llm(max_model_len=250)
    steps = SlowSteps(llm, 0.1)
    with served(llm, shutdown_timeout=1) as server:
        streamed, whole = (begin(server, LONG | {"max_tokens": 240, "stream": stream}) for stream in (True, False))
        stream = streamed.getresponse()
        until(lambda: steps.num > 1)
        server.server._server.force_exit = second_signal
    *chunks, last = server.events(stream.read().decode())
    answer = whole.getresponse()
    assert chunks
    assert last["error"]["type"] == "service_unavailable_error"
    assert "--shutdown-timeout" in last["error"]["message"]
    assert (answer.status, json.loads(answer.read())) == (503, last)
    assert [record for record in caplog.records if record.exc_info or "Traceback" in record.getMessage()] == []
    for connection in (streamed, whole):
        connection.close()


def test_what_is_cut_off_need_not_wait_for_a_long_step():
    llm = chat_llm()
    steps = SlowSteps(llm, 0.01)
    with served(llm, shutdown_timeout=1) as server:
        connection = begin(server, LONG | {"stream": True})
        stream = connection.getresponse()
        until(lambda: steps.num > 1)
        steps.seconds = 4
        server.server.stop()
        assert server.events(stream.read().decode())[-1]["error"]["type"] == "service_unavailable_error"
        assert server.model.engine.is_running
    connection.close()


def test_one_that_waits_for_its_grammar_is_cut_off_with_an_error(monkeypatch, caplog):
    llm = chat_llm()
    accept, may_compile = llm.engine.accept, threading.Event()

    def slow(request):
        may_compile.wait(30)
        accept(request)

    monkeypatch.setattr(llm.engine, "accept", slow)
    with served(llm, shutdown_timeout=1) as server:
        connection = begin(server, LONG)
        until(lambda: server.model.admission.num_inside == 1)
    may_compile.set()
    answer = connection.getresponse()
    assert answer.status == 503
    assert [record for record in caplog.records if record.exc_info] == []
    connection.close()


def test_a_scrape_that_a_long_step_outlasts_ends_nothing(monkeypatch):
    """The fault: one GET /metrics during a step of more than ten seconds, and the engine was gone for good."""
    monkeypatch.setattr("forerun.server.served_model.MOST_METRICS_WAIT_S", 0.01)
    llm = chat_llm()
    steps = SlowSteps(llm, 0.3)
    with served(llm) as server, ThreadPoolExecutor(1) as threads:
        answer = threads.submit(server.post, "/v1/completions", LONG | {"max_tokens": 4})
        until(lambda: llm.engine.has_work)
        for _ in range(3):
            status, _, text = server.send("GET", "/metrics")
            assert status == 200
            assert "vllm:e2e_request_latency_seconds" in text
        assert len(answer.result()["choices"][0]["text"]) > 0
        assert steps.num == 4
        assert server.send("GET", "/health")[0] == 200


def test_health_reports_a_step_that_hangs_and_recovers():
    llm = chat_llm()
    SlowSteps(llm, 2.5)
    with served(llm, step_timeout=1) as server, ThreadPoolExecutor(1) as threads:
        answer = threads.submit(server.post, "/v1/completions", LONG | {"max_tokens": 1})
        until(lambda: server.send("GET", "/health")[0] == 503)
        assert "--step-timeout" in server.send("GET", "/health")[2]["error"]["message"]
        assert answer.result()["choices"]
        until(lambda: server.send("GET", "/health")[0] == 200)


def test_a_second_signal_ends_the_engine_at_once():
    llm = chat_llm()
    steps = SlowSteps(llm)

    async def open_connections_end():
        while server.server._server.server_state.connections:
            await asyncio.sleep(0.01)

    with served(llm) as server:
        connection = begin(server, LONG | {"stream": True})
        until(lambda: steps.num)
        server.server._server.servers[0].wait_closed = open_connections_end  # as in Python 3.12 and later
        server.server._server.force_exit = True
        server.server.stop()
        until(lambda: not server.model.engine.is_running)
        connection.close()
        assert server.model.engine.failure is None
    assert steps.num < 100


def test_of_clients_that_have_gone_nothing_is_begun(monkeypatch):
    """The fault: prompts of clients that had long gone were made into tokens one after the other, before anybody else's."""
    llm = chat_llm()
    accept, may_go_on, begun = llm.engine.accept, threading.Event(), []

    def slow(request):
        begun.append(request)
        may_go_on.wait(30)
        accept(request)

    monkeypatch.setattr(llm.engine, "accept", slow)
    body = {"prompt": PROMPT, "max_tokens": 2, "structured_outputs": {"regex": "[ab]+"}}
    with served(llm) as server:
        connections = [begin(server, body) for _ in range(10)]
        until(lambda: server.model.admission.num_inside == 10 and len(begun) == NUM_GRAMMAR_THREADS)
        for connection in connections:
            connection.sock.close()
            connection.close()
        until(lambda: server.model.admission.num_inside == 0)
        may_go_on.set()
        assert server.post("/v1/completions", body)["choices"]
        assert len(begun) == NUM_GRAMMAR_THREADS + 1
        until(lambda: not llm.engine.has_work)


def test_new_grammars_keep_no_other_request_waiting(monkeypatch):
    llm = chat_llm()
    accept, may_compile = llm.engine.accept, threading.Event()

    def slow_with_a_grammar(request):
        if request.sampling.structured_outputs is not None:
            may_compile.wait(30)
        accept(request)

    monkeypatch.setattr(llm.engine, "accept", slow_with_a_grammar)
    constrained = {"prompt": PROMPT, "max_tokens": 2, "structured_outputs": {"regex": "[ab]+"}}
    with served(llm) as server, ThreadPoolExecutor(10) as clients:
        waiting = [clients.submit(server.post, "/v1/completions", constrained) for _ in range(10)]
        until(lambda: server.model.admission.num_inside == 10)
        assert server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1})["choices"]
        assert not any(one.done() for one in waiting)
        may_compile.set()
        assert all(one.result()["choices"] for one in waiting)
