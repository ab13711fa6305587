"""What /v1/responses refuses, and answers that cannot go on."""

from __future__ import annotations

import json
import logging

import pytest
from openai import APIError

from forerun.server import responses
from forerun.server.protocol import MOST_LOGPROBS
from forerun.server.responses_protocol import MOST_ITEMS
from tests.server.response_items import ASKED, FUNCTIONS, LOGPROBS, LONG, PATH, SPACE, call, given, stream
from tests.server.served import CHAT, NAME, chat_llm, served
from tests.server.test_errors import HEAVY
from tests.server.test_load import SlowSteps, assert_nothing_is_left_of, begin, until


def refusal(server, body, path=PATH, method="POST"):
    """(status, error) of a request that must fail."""
    status, _, answer = server.send(method, path, body)
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert len(answer["error"]["message"]) < 500
    return status, answer["error"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": None}, "input: "),
        ({"input": []}, "input: "),
        ({"input": 3}, "input: "),
        ({"input": [{"role": "tool", "content": "a"}]}, "input.0.role: "),
        ({"input": [{"role": "user"}]}, "input.0.content: is missing"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input: got an item of type 'item_reference' at 0; may have 'message'"),
        ({"input": [{"type": []}]}, "input: got an item of type []"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content: got a part of type 'input_image'"),
        ({"input": [given([{"type": "input_file"}])]}, "input.0.output: got a part of type 'input_file'"),
        ({"input": [call(arguments="{")]}, "input.0.arguments: not JSON"),
        ({"input": "a" * 300}, "input: the prompt is too long: 319 tokens > 255 maximum"),
        ({"input": "a b " * 100_000}, "input: got 400050 characters"),
        ({"input": "\ud800"}, "input: got half of a surrogate pair"),
        ({"input": [{"role": "user", "content": "a"}] * (MOST_ITEMS + 1)}, "input: "),
        ({"input": [{"type": "reasoning", "id": "r", "summary": []}]}, "input: list should have at least 1 item"),
        ({"input": [call()] * 130}, "input: list should have at most 128 items"),
        ({"tools": [SPACE | {"name": "a" * 64, "tools": [FUNCTIONS[0] | {"name": "b" * 64}]}]}, "tools: string should match"),
        ({"user": "\ud800"}, "user: holds half of a surrogate pair"),
        ({"tools": [FUNCTIONS[0] | {"parameters": {"maximum": float("nan")}}], "tool_choice": "none"}, "tools: holds "),
        ({"max_output_tokens": 0}, "max_output_tokens: "),
        ({"tools": [{"type": "web_search"}]}, "tools: got one of type 'web_search' at 0; may be 'function' or 'namespace'"),
        ({"tools": [{"type": "custom", "name": "a"}]}, "tools: got one of type 'custom'"),
        ({"tools": [SPACE | {"tools": [{"type": "custom"}]}]}, "tools.0.tools: got one of type 'custom'"),
        ({"tools": [{"type": "function"}]}, "tools.0.name: is missing"),
        ({"tools": FUNCTIONS * 2}, "tools: two have the same name"),
        ({"tools": FUNCTIONS, "tool_choice": {"type": "function", "name": "other"}}, "tool_choice: 'other' is none of the tools"),
        ({"tools": FUNCTIONS, "tool_choice": {"type": "web_search"}}, "tool_choice: "),
        ({"tool_choice": "required"}, "tool_choice: is given without tools"),
        ({"tools": FUNCTIONS, **LOGPROBS}, "include: 'message.output_text.logprobs' is given with tools"),
        ({"top_logprobs": 2}, "top_logprobs: is given without log probabilities"),
        ({**LOGPROBS, "top_logprobs": MOST_LOGPROBS + 1}, "top_logprobs: "),
        ({"include": ["made.up"]}, "include.0: "),
        ({"text": {"format": {"type": "regex"}}}, "text.format: "),
        ({"text": {"format": {"type": "json_schema", "name": "a", "strict": True, "schema": {"minContains": 3}}}}, "text.format.schema: "),
        ({"metadata": {str(n): "a" for n in range(17)}}, "metadata: got 17 entries; may have 16"),
        ({"metadata": {"a": "b" * 513}}, "metadata.a: "),
        ({"truncation": "auto"}, "truncation: "),
        ({"stream_options": {}}, "stream_options: is given without stream"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation: "),
        ({"previous_response_id": "resp_1"}, "previous_response_id: is not served; leave it out (nothing is kept here; send"),
        ({"conversation": "conv_1"}, "conversation: is not served"),
        ({"background": True}, "background: is not served"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt: is not served"),
        ({"context_management": [{"type": "compaction"}]}, "context_management: is not served"),
        ({"max_tokens": 3}, "max_tokens: is for /v1/chat/completions; use max_output_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format: is for /v1/chat/completions; use text.format"),
        ({"messages": CHAT}, "messages: is for /v1/chat/completions; use input"),
        ({"n": 2}, "n: is for /v1/chat/completions"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs: is for /v1/chat/completions"),
        ({"forerun": {"origins": True}}, "forerun.origins: is for /v1/chat/completions"),
        ({"forerun": {"speculation": "on"}}, "forerun.speculation: "),
        ({"temperature": -1}, "temperature: "),
        ({"chat_template_kwargs": {"made_up": 1}}, "chat_template_kwargs: "),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_in_the_words_of_the_request(plain, fields, message):
    body = {name: value for name, value in (ASKED | fields).items() if value is not None}
    status, error = refusal(plain, body)
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith(message)
    assert error["param"] == message.split(":")[0].split(".")[0]
    assert plain.model.admission.num_inside == 0


def test_a_field_that_is_refused_is_not_said_to_be_ignored(plain, caplog):
    with caplog.at_level(logging.WARNING, "forerun.server"):
        assert refusal(plain, ASKED | {"n": 2})[1]["param"] == "n"
    assert "ignored" not in caplog.text


def test_a_count_is_refused_as_an_answer_is(plain):
    path = f"{PATH}/input_tokens"
    assert refusal(plain, {"model": "gpt", "input": "a"}, path)[0] == 404
    for field in ({"previous_response_id": "resp_1"}, {"input": "\ud800"}, {"chat_template_kwargs": {"made_up": 1}}):
        assert refusal(plain, {"input": "a"} | field, path)[1]["param"] == next(iter(field))


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "1"), ("DELETE", "1"), ("GET", "1/input_items"), ("POST", "1/cancel"), ("POST", "compact")],
)
def test_no_response_is_kept(plain, method, path):
    status, error = refusal(plain, None, f"{PATH}/{path}", method)
    assert status == 404
    assert error["message"].startswith("responses are not kept here")


def test_a_name_that_is_not_served_is_not_found(plain):
    assert refusal(plain, ASKED | {"model": "gpt"})[1]["code"] == "model_not_found"


def test_a_bug_is_a_server_error_without_its_reason(plain, monkeypatch):
    def fail(*_arguments):
        raise RuntimeError("secret")

    monkeypatch.setattr(responses, "chat_fields", fail)
    status, error = refusal(plain, ASKED)
    assert (status, error["type"]) == (500, "server_error")
    assert "secret" not in error["message"]


def test_an_error_in_midstream_is_told_twice_and_ends_the_stream(plain):
    heavy = {"text": {"format": {"type": "json_schema", "name": "a", "schema": HEAVY}}, "max_output_tokens": 40}
    heavy |= {"temperature": 1, "seed": 1}
    *_, error, failed = stream(plain, **heavy)
    assert (error["type"], failed["type"]) == ("error", "response.failed")
    assert error["message"].startswith("text.format: the grammar takes too much work here")
    assert refusal(plain, ASKED | heavy)[1] == error["error"]
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "invalid_prompt", "message": error["message"]}
    with pytest.raises(APIError, match=r"text\.format"):
        list(plain.client().responses.create(model=NAME, input="hello", stream=True, extra_body=heavy))


def test_what_the_servers_end_cuts_off_ends_with_an_error():
    llm = chat_llm()
    steps = SlowSteps(llm, 0.1)
    asked = ASKED | {"text": LONG, "max_output_tokens": 200}
    with served(llm, shutdown_timeout=1) as server:
        streamed, whole = (begin(server, asked | {"stream": stream}, PATH) for stream in (True, False))
        stream = streamed.getresponse()
        until(lambda: steps.num > 1)
    *events, rest = stream.read().decode().split("\n\n")
    answer = whole.getresponse()
    *_, error, failed = (json.loads(event.partition("data: ")[2]) for event in events)
    assert (error["type"], failed["type"], rest) == ("error", "response.failed", "")
    assert failed["response"]["error"]["code"] == "server_error"
    assert (answer.status, json.loads(answer.read())["error"]) == (503, error["error"])
    assert failed["sequence_number"] == len(events) - 1
    for connection in (streamed, whole):
        connection.close()


def test_a_client_that_goes_away_leaves_nothing_behind():
    assert_nothing_is_left_of(ASKED | {"text": LONG, "max_output_tokens": 200}, PATH)
