"""Requests sent at given times to a server with scripted answers, and their figures."""

from __future__ import annotations

import asyncio
import time

import pytest

from benchmarks.swinging_load.loading import FailedRequestError, load_server, send_at, sum_up
from forerun.bench.load.answer import Answer, Chunk, LoadRequest
from tests.bench.load.fake_server import Script, serving


def load(script, times, **options):
    prompts = [f"prompt {number}" for number in range(len(times) + 3)]
    with serving(script):
        return asyncio.run(
            load_server(script.url, "fake", prompts, times, **{"max_tokens": 9, "num_warmups": 2} | options)
        )


def test_each_request_is_sent_once_after_the_warm_up():
    script = Script()
    answers, _ = load(script, [0.0, 0.02, 0.04])
    asked = [body["messages"][0]["content"] for body in script.bodies]
    assert sorted(asked[:2]) == ["prompt 3", "prompt 4"]
    assert asked[2:] == ["prompt 0", "prompt 1", "prompt 2"]
    assert [answer.request.prompt for answer in answers] == asked[2:]
    assert all((body["temperature"], body["max_completion_tokens"]) == (0, 9) for body in script.bodies)


def test_requests_do_not_wait_for_earlier_answers():
    script = Script(first_delay=0.2)
    _, seconds = load(script, [0.0] * 8, num_warmups=0)
    assert script.most_at_once == 8
    assert seconds >= 0.2


def test_a_request_that_is_sent_late_has_waited():
    async def block(request, request_id):
        answer = Answer(request, started=time.perf_counter())
        time.sleep(0.05)
        return answer

    answers, _ = asyncio.run(send_at([0.0, 0.0], [LoadRequest("a", 1)] * 2, block))
    assert answers[1].queue_time >= 0.05


def test_a_failed_request_is_an_error():
    with pytest.raises(FailedRequestError, match="a request failed: 500"):
        load(Script(fail_with=(500, '{"error": {"message": "no"}}')), [0.0])


def answer(latency, *, tokens=5, queue_time=0.0, text="words", started=0.0):
    chunks = [Chunk(0.5, True, 1), Chunk(latency, True, tokens)]
    return Answer(
        LoadRequest("a", tokens),
        started=started,
        queue_time=queue_time,
        chunks=chunks,
        text=text,
        num_output_tokens=tokens,
    )


def test_latencies_are_from_the_arrival():
    result = sum_up([answer(2.5), answer(4.5, queue_time=1.0)], 8.0, config="plain", pace=1.0, round_number=0)
    assert result.mean_latency == pytest.approx((2.5 + 5.5) / 2)
    assert result.mean_ttft == pytest.approx((0.5 + 1.5) / 2)
    assert result.mean_tpot == pytest.approx((2.0 / 4 + 4.0 / 4) / 2)
    assert (result.num_requests, result.num_tokens, result.requests_per_second) == (2, 10, 0.25)


def test_the_number_of_running_requests_is_known():
    answers = [answer(2.5, started=0.0), answer(2.5, started=1.0), answer(2.5, started=10.0)]
    assert sum_up(answers, 12.5, config="plain", pace=1.0, round_number=0).most_running == 2


def test_equal_texts_have_equal_digests():
    result = sum_up([answer(1.0), answer(2.0), answer(2.0, text="more")], 2.0, config="a", pace=1.0, round_number=0)
    first, second, third = result.texts
    assert first == second != third
