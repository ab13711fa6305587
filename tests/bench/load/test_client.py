"""One request to a server: its body, its answer, its failures, and the parsing of event streams."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from forerun.bench.load.answer import LoadRequest
from forerun.bench.load.client import Endpoint, EventStream, ask
from tests.bench.load.fake_server import Script, serving

STREAM = (
    b': ping\n\ndata: {"a": 1}\n\nevent: x\ndata:one\ndata: two\n\ndata: \xe2\x82\xac\r\n\r\nid: 3\n\ndata: [DONE]\n\n'
)
EVENTS = [b'{"a": 1}', b"one\ntwo", "€".encode(), b"[DONE]"]
PATHS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


def answer(script, *, backend="openai", prompt="to be", body=None, url=None):
    async def one():
        endpoint = Endpoint(
            url=(url or script.url) + PATHS[backend],
            backend=backend,
            model="fake",
            body=body or {},
            headers={"Authorization": "Bearer key"},
        )
        async with aiohttp.ClientSession() as session:
            return await ask(session, endpoint, LoadRequest(prompt, 16), "bench-0")

    return asyncio.run(one())


@pytest.mark.parametrize("prompt", ["to be", [1, 2, 3]], ids=["text", "token ids"])
def test_a_completion_is_asked_for_as_vllm_does(prompt):
    with serving(Script()) as script:
        answer(script, prompt=prompt, body={"temperature": 0})
    assert script.bodies == [
        {
            "model": "fake",
            "prompt": prompt,
            "max_tokens": 16,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
    ]
    assert script.headers[0]["x-request-id"] == "bench-0"
    assert script.headers[0]["Authorization"] == "Bearer key"


def test_a_chat_is_one_message_of_the_user():
    with serving(Script()) as script:
        answer(script, backend="openai-chat")
    (body,) = script.bodies
    assert body["messages"] == [{"role": "user", "content": "to be"}]
    assert (body["max_completion_tokens"], "prompt" in body, "max_tokens" in body) == (16, False, False)


@pytest.mark.parametrize("backend", PATHS)
@pytest.mark.parametrize("usage", ["own", "last", "continuous"])
def test_tokens_are_the_servers_wherever_it_says_them(backend, usage):
    with serving(Script(chunks=[1, 4, 3], usage=usage)) as script:
        found = answer(script, backend=backend)
    assert found.error is None
    assert (found.num_prompt_tokens, found.num_output_tokens, found.text) == (7, 8, "x" * 8)
    assert len(found.itls) == 2
    expected = [1, 4, 3] if usage == "continuous" else [8 / 3] * 3
    assert [tokens for _, tokens in found.weighted_chunks] == pytest.approx(expected)


def test_without_usage_tokens_are_unknown():
    with serving(Script(usage="none")) as script:
        found = answer(script)
    assert (found.error, found.num_output_tokens) == (None, None)


def test_times_are_those_of_the_stream():
    with serving(Script(chunks=[1, 4, 4], first_delay=0.2, delay=0.1)) as script:
        found = answer(script, backend="openai-chat")
    assert 0.19 < found.ttft < found.latency
    assert found.latency > 0.39
    assert len(found.itls) == 2
    assert found.latency == pytest.approx(found.ttft + sum(found.itls))


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (
            Script(fail_with=(429, '{"error": {"message": "too\\nmany", "type": "x"}}')),
            "429 Too Many Requests: too many",
        ),
        (Script(fail_with=(401, '{"error": "Unauthorized"}')), "401 Unauthorized: Unauthorized"),
        (Script(fail_with=(500, "no JSON")), "500 Internal Server Error: no JSON"),
        (Script(break_after=2), "the stream broke off before the answer's end"),
        (Script(break_after=0), "the server sent no chunk of an answer"),
        (Script(error_after=1), "error in the stream: out of luck"),
        (Script(fail_with=(200, "data: nonsense\n\n")), "not an OpenAI stream"),
        (Script(fail_with=(200, "data: [1]\n\n")), "not an OpenAI stream"),
        (Script(fail_with=(200, '{"choices": []}')), "the server sent no chunk of an answer"),
    ],
)
def test_what_goes_wrong_is_the_answers_error(script, error):
    with serving(script):
        assert answer(script).error.startswith(error)


def test_a_server_that_is_gone_is_an_error_of_the_answer():
    with serving(Script()) as script:
        pass
    assert answer(script).error.startswith("ClientConnectorError")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_the_same_however_the_bytes_are_cut(size):
    events = EventStream()
    pieces = [STREAM[start : start + size] for start in range(0, len(STREAM), size)]
    assert [data for piece in pieces for data in events.feed(piece)] == EVENTS
    assert events.close() == []


def test_a_last_event_needs_no_blank_line():
    events = EventStream()
    assert events.feed(b"data: [DONE]") == []
    assert events.close() == [b"[DONE]"]
