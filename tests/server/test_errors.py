"""Bad requests: OpenAI's shape, the right status, what to change, and a server that lives on."""

from __future__ import annotations

import json
import logging
import threading

import pytest
from pydantic import ValidationError

from forerun.errors import ConfigError, ModelError, RequestError
from forerun.server import completions, request_params
from forerun.server.app import MOST_BODY_BYTES
from forerun.server.errors import failed_while_running
from forerun.server.options import ServerOptions
from forerun.server.protocol import (
    MOST_ALLOWED_TOKENS,
    MOST_MESSAGES,
    MOST_STOP_TOKENS,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
)
from forerun.server.request_params import _warned
from forerun.server.serve import Server
from tests.server.served import CHAT, PROMPT, Served, chat_ids, chat_llm, offline
from tests.server.tool_models import allowed

TEXT = {"prompt": PROMPT, "max_tokens": 1}
TALK = {"messages": CHAT, "max_tokens": 1}
TOOL = {"type": "function", "function": {"name": "f"}}


def nested(depth):
    """A schema of so many levels."""
    return {"properties": nested(depth - 1)} if depth else {}


def refusal(server, path, body):
    """(status, error) of a request that must fail, in the right shape and with nothing private in it."""
    status, _, answer = server.send("POST", path, body)
    assert set(answer) == {"error"}
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    assert len(error["message"]) < 500
    assert "Traceback" not in error["message"]
    return status, error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": 5}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prediction": {"type": "content", "content": "\ud800"}}, "prediction"),
        ({"kv_transfer_params": {"include_output_tokens": True}}, "kv_transfer_params"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [264]}, "prompt"),
        ({"prompt": [264], "echo": True}, "prompt"),
        ({"prompt": "a" * 1000}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": "2"}, "n"),
        ({"n": True}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"best_of": 10**1000}, "best_of"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1, "min_tokens": 2}, "min_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"stop": [*map(str, range(17))]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": "a" * 2000}, "stop"),
        ({"bad_words": ["a" * 2000]}, "bad_words"),
        ({"stop": 5}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"9999": 1}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [999]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * (MOST_STOP_TOKENS + 1)}, "stop_token_ids"),
        ({"suffix": "end"}, "suffix"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"forerun": {"speculatoin": "on"}}, "forerun"),
        ({"forerun": {"num_speculative_tokens": -1}}, "forerun"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"guided_json": {}}, "guided_json"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"grammar": "root ::= 'a'"}, "grammar"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": "a"}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": 5}, "response_format"),
        ({"response_format": {"type": "regex", "regex": "("}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": {"type": "object"}}}, "response_format"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"tools": [TOOL]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
    ],
)
def test_a_bad_completion_request_is_told_what_to_change(plain, fields, param):
    status, error = refusal(plain, "/v1/completions", TEXT | fields)
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert len(error["message"]) < 500
    assert plain.post("/v1/completions", TEXT)["choices"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"content": "hello"}]}, "messages"),
        ({"messages": [{"role": "", "content": "hello"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools"),
        ({"tools": [{"function": {"name": "f", "parameters": {"type": "string"}}}]}, "tools"),
        ({"tools": [{"function": {"name": "f", "parameters": 5}}]}, "tools"),
        ({"tools": [{"function": {"name": "f"}}] * 2}, "tools"),
        ({"tools": [{"function": {"name": f"f{i}"}} for i in range(129)]}, "tools"),
        ({"tools": [{"function": {"name": "f", "parameters": nested(100)}}]}, "tools"),
        ({"tools": [{"function": {"name": "f"}}], "structured_outputs": {"regex": "a"}}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": allowed("g")}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": allowed()}, "tool_choice"),
        ({"tools": [TOOL], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "xml"}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "a"}}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"response_format": {"type": "text"}, "structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ],
)
def test_a_bad_chat_request_is_told_what_to_change(plain, fields, param):
    status, error = refusal(plain, "/v1/chat/completions", TALK | fields)
    assert (status, error["param"]) == (400, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "none"},
        {"tools": [TOOL], "tool_choice": "none"},
        {"modalities": ["text"]},
        {"tools": None, "guided_json": None, "response_format": None},
        {"response_format": {"type": "text"}},
        {"user": "somebody", "stream_options": None},
    ],
)
def test_fields_that_ask_for_nothing_are_taken(plain, fields):
    assert plain.post("/v1/chat/completions", TALK | fields)["choices"]


@pytest.mark.parametrize("stream", [False, True])
def test_rules_that_leave_no_token_are_the_callers_fault(plain, stream):
    (token_id,) = offline().get_tokenizer().encode("C")
    fields = {"allowed_token_ids": [token_id], "bad_words": ["C"]}
    if stream:
        (answer,) = plain.stream("/v1/completions", TEXT | fields)
        assert answer["error"]["type"] == "invalid_request_error"
    else:
        status, error = refusal(plain, "/v1/completions", TEXT | fields)
        assert status == 400
        assert "forbid every token" in error["message"]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"forerun": {"speculation": "maybe", "num_speculative_tokens": "3"}},
            "forerun.speculation: input should be 'on' or 'off'",
        ),
        ({"tools": [{"type": "custom"}]}, "tools.0.type: input should be 'function'"),
        ({"prediction": {"type": "x"}}, "prediction.type: input should be 'content'"),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages.0.content: input should be a valid string, or input should be a valid list",
        ),
        (
            {"messages": [{"role": "user", "contents": "a"}]},
            "messages.0: has no content, and role 'user'; give it a text, which may be empty",
        ),
        (
            {"messages": [*CHAT, {"role": "tool", "content": None}]},
            "messages.1: has no content, and role 'tool'; give it a text, which may be empty",
        ),
        (
            {"messages": [{"role": "usr", "contents": "a"}]},
            "messages.0: has no content, and role 'usr'; give it a text, which may be empty",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages.0.content.0.text: is missing; give one",
        ),
        ({"stop": [1]}, "stop.0: input should be a valid string"),
        (
            {"tool_choice": "any"},
            "tool_choice: input should be 'none', 'auto' or 'required', or input should be a valid dictionary or object to "
            "extract fields from",
        ),
    ],
)
def test_of_several_mistakes_one_is_told_and_of_a_value_of_several_types_what_it_may_be(plain, fields, told):
    status, error = refusal(plain, "/v1/chat/completions", TALK | fields)
    assert (status, error["message"], error["param"]) == (400, told, next(iter(fields)))


HEAVY = {"type": "object", "properties": {f"p{place}": {"type": "integer"} for place in range(2000)}}
"""A schema that compiles, and takes more work than a grammar may while a text is written."""


def failure(server, path, body, *, stream):
    """The error that ends a request of the client's fault while it runs."""
    if stream:
        *_, last = server.stream(path, body)
        return last["error"]
    status, error = refusal(server, path, body)
    assert status == 400
    return error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"structured_outputs": {"json": HEAVY}}, "structured_outputs"),
        (
            "/v1/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": HEAVY}}},
            "response_format",
        ),
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": HEAVY}}},
            "response_format",
        ),
    ],
)
def test_a_grammar_that_takes_too_much_work_while_it_runs_is_the_fault_of_the_field_that_asked_for_it(
    plain, path, fields, param, stream
):
    about = TALK if "chat" in path else TEXT
    error = failure(plain, path, about | fields | {"max_tokens": 40, "temperature": 1, "seed": 1}, stream=stream)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"].startswith(f"{param}: the grammar takes too much work here")


@pytest.mark.parametrize("stream", [False, True])
def test_rules_that_leave_no_token_are_told_with_the_field_that_the_client_wrote(plain, stream):
    fields = {"response_format": {"type": "choice", "choice": ["yes"]}, "allowed_token_ids": [5]}
    error = failure(plain, "/v1/completions", TEXT | fields, stream=stream)
    assert (error["type"], error["param"]) == ("invalid_request_error", None)
    assert error["message"].startswith(
        "sampling: the rules forbid every token; loosen response_format, allowed_token_ids"
    )


def test_whose_mistake_an_error_is_stands_in_its_kind_and_not_in_its_words():
    text = "sampling: structured_outputs: anything"
    assert isinstance(failed_while_running(text, RequestError(text).kind), RequestError)
    assert failed_while_running(text, ModelError(text).kind).status_code == 500
    assert failed_while_running(text, None).status_code == 500


@pytest.mark.parametrize("error", [ModelError, ConfigError])
def test_an_error_of_the_servers_kind_is_500_without_its_reason(plain, monkeypatch, error):
    def fail(*_args):
        raise error("prompt: secret")

    monkeypatch.setattr(plain.model, "check_name", fail)
    status, answered = refusal(plain, "/v1/completions", TEXT)
    assert (status, answered["type"], answered["param"]) == (500, "server_error", None)
    assert "secret" not in answered["message"]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "text\n"])
def test_a_part_that_is_no_text_is_refused_in_a_clear_sentence(plain, kind):
    content = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {"url": "data:,"}}]
    body = TALK | {"messages": [{"role": "user", "content": content}]}
    status, error = refusal(plain, "/v1/chat/completions", body)
    assert (status, error["param"]) == (400, "messages")
    assert error["message"] == (
        f"messages.0.content: got a part of type {kind!r}; this model reads text only; send parts of type 'text'"
    )


def test_an_unknown_field_is_ignored_with_one_warning(plain, caplog):
    _warned.clear()
    with caplog.at_level(logging.WARNING, "forerun.server"):
        for _ in range(3):
            plain.post("/v1/completions", TEXT | {"made_up\n": 1})
    (record,) = caplog.records
    assert "'made_up\\n'" in record.getMessage()


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "[]",
        "5",
        '"text"',
        "null",
        "{'prompt': 'a'}",
        "[" * 100_000,
        '{"prompt": "a", "seed": ' + "1" * 5000 + "}",
        '{"prompt": "\\ud800"}',
        '{"prompt": "a", "temperature": NaN}',
        '{"prompt": "a", "logit_bias": {"1": Infinity}}',
        '{"prompt": "a", "guided_\\ud800": 1}',
        '{"prompt": "a", "forerun": {"\\ud800": 1}}',
        '{"prompt": "a", "logit_bias": {"\\ud800": 1}}',
        b"\xff\xfe",
    ],
)
def test_a_body_that_is_no_request_is_refused(plain, body):
    status, _ = refusal(plain, "/v1/completions", body)
    assert status == 400
    assert plain.post("/v1/completions", TEXT)["choices"]


@pytest.mark.parametrize("body", [b'{"prompt": "\xff"}', "[" * 100_000, '{"prompt": "a", "seed": ' + "1" * 5000 + "}"])
def test_a_body_that_cannot_be_read_is_told_what_it_must_be(plain, body):
    status, error = refusal(plain, "/v1/completions", body)
    assert status == 400
    assert error["message"].startswith("body: cannot be read; must be JSON in UTF-8")


@pytest.mark.parametrize(
    ("path", "prompt", "limit"),
    [
        ("/v1/completions", {"prompt": PROMPT}, "max_tokens"),
        ("/v1/completions", {"prompt": PROMPT, "echo": True}, "max_tokens"),
        ("/v1/completions", {"prompt": ["a", PROMPT]}, "max_tokens"),
        ("/v1/chat/completions", {"messages": CHAT}, "max_tokens"),
        ("/v1/chat/completions", {"messages": CHAT}, "max_completion_tokens"),
    ],
)
def test_more_tokens_than_the_prompt_leaves_room_for_are_refused(plain, path, prompt, limit):
    most = 256 - (9 if "prompt" in prompt else len(chat_ids(CHAT)))
    status, error = refusal(plain, path, prompt | {limit: most + 1})
    assert (status, error["param"], error["code"]) == (400, limit, "context_length_exceeded")
    assert "this model's maximum context length is 256 tokens" in error["message"]
    assert f"may be at most {most}, or left out" in error["message"]
    assert plain.post(path, prompt | {limit: most})["choices"]


def test_a_length_that_is_not_asked_for_is_cut_to_the_room(plain):
    answer = plain.post("/v1/completions", {"prompt": [80] * 250, "ignore_eos": True})
    assert answer["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a b " * 100_000}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a b " * 100_000}]}, "messages"),
        ("/v1/completions", TEXT | {"prediction": {"type": "content", "content": "a b " * 100_000}}, "prediction"),
    ],
)
def test_a_text_that_is_far_too_long_is_refused_before_it_is_made_into_tokens(plain, monkeypatch, path, body, param):
    def encode(*arguments, **options):
        raise AssertionError("a second for each megabyte or two")

    tokenizer = plain.llm.get_tokenizer()
    monkeypatch.setattr(type(tokenizer), "encode", encode)
    monkeypatch.setattr(type(tokenizer), "encode_chat", encode)
    status, error = refusal(plain, path, body)
    assert (status, error["param"], error["code"]) == (400, param, "context_length_exceeded")
    assert "this model's maximum context length is 256 tokens of at most" in error["message"]


def test_a_prediction_that_is_far_too_long_is_refused_in_a_conversation_too(plain):
    body = TALK | {"prediction": {"type": "content", "content": "a b " * 100_000}}
    status, error = refusal(plain, "/v1/chat/completions", body)
    assert (status, error["param"], error["code"]) == (400, "prediction", "context_length_exceeded")


def test_behind_a_prompt_that_is_too_long_none_is_made_into_tokens(plain, monkeypatch):
    tokenizer, encoded = plain.llm.get_tokenizer(), []
    encode = type(tokenizer).encode
    monkeypatch.setattr(
        type(tokenizer), "encode", lambda self, text, **more: encoded.append(text) or encode(self, text, **more)
    )
    status, error = refusal(plain, "/v1/completions", {"prompt": ["a", "b" * 300, "c"]})
    assert (status, error["param"]) == (400, "prompt")
    assert encoded == ["a", "b" * 300]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [80] * 256}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 999}]}, "messages"),
    ],
)
def test_a_prompt_that_fills_the_context_is_refused_in_openais_words(plain, path, body, param):
    status, error = refusal(plain, path, body)
    assert (status, error["param"], error["code"]) == (400, param, "context_length_exceeded")
    assert "this model's maximum context length is 256 tokens" in error["message"], "LiteLLM knows it by these words"
    assert "prompt is too long" in error["message"], (
        "and LangChain by these, where the client's error does not show the code"
    )


def test_an_echo_of_too_many_logprobs_is_refused(plain, monkeypatch):
    body = {"prompt": [[80] * 9, [80] * 8], "echo": True, "n": 2, "logprobs": 3, "max_tokens": 1}
    num_echoed = (9 + 8) * 2 * (3 + 1)
    monkeypatch.setattr(completions, "MOST_ECHOED_LOGPROBS", num_echoed)
    assert len(plain.post("/v1/completions", body)["choices"]) == 4
    monkeypatch.setattr(completions, "MOST_ECHOED_LOGPROBS", num_echoed - 1)
    status, error = refusal(plain, "/v1/completions", body)
    assert (status, error["param"]) == (400, "logprobs")
    assert plain.post("/v1/completions", body | {"echo": False})["choices"]
    assert plain.post("/v1/completions", body | {"logprobs": None})["choices"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "logprobs": 3, "max_tokens": 5}, "logprobs"),
        ("/v1/chat/completions", TALK | {"n": 4, "logprobs": True, "top_logprobs": 3, "max_tokens": 5}, "top_logprobs"),
    ],
)
def test_several_completions_with_too_many_logprobs_are_refused(plain, monkeypatch, path, body, param):
    monkeypatch.setattr(request_params, "MOST_LOGPROBS_OF_SEVERAL", 4 * 5 * (3 + 1))
    assert len(plain.post(path, body)["choices"]) == 4
    monkeypatch.setattr(request_params, "MOST_LOGPROBS_OF_SEVERAL", 4 * 5 * (3 + 1) - 1)
    status, error = refusal(plain, path, body)
    assert (status, error["param"]) == (400, param)
    assert plain.post(path, body | {"max_tokens": 4})["choices"]
    assert plain.post(path, body | {"logprobs": None, "top_logprobs": None})["choices"]


def test_an_answer_of_unsaid_length_counts_with_all_that_fits(plain, monkeypatch):
    body = {"messages": CHAT, "n": 2, "logprobs": True}
    monkeypatch.setattr(request_params, "MOST_LOGPROBS_OF_SEVERAL", 2 * (256 - len(chat_ids(CHAT))) - 1)
    status, error = refusal(plain, "/v1/chat/completions", body)
    assert (status, error["param"]) == (400, "logprobs")


def test_a_single_completion_may_have_all_logprobs_that_fit(plain, monkeypatch):
    monkeypatch.setattr(request_params, "MOST_LOGPROBS_OF_SEVERAL", 0)
    assert plain.post("/v1/completions", TEXT | {"logprobs": 3})["choices"]


MANY = 100_000


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionBody, {"prompt": [-1] * MANY}),
        (CompletionBody, {"prompt": [{}] * MANY}),
        (CompletionBody, {"prompt": [[-1] * MANY]}),
        (CompletionBody, TEXT | {"allowed_token_ids": [-1] * MOST_ALLOWED_TOKENS}),
        (CompletionBody, TEXT | {"stop_token_ids": [-1] * MOST_STOP_TOKENS}),
        (CompletionBody, TEXT | {"logit_bias": {str(place): "a" for place in range(MANY)}}),
        (CompletionBody, TEXT | {"forerun": dict.fromkeys(map(str, range(MANY)))}),
        (CompletionBody, TEXT | {"prediction": {"type": "content", "content": [0] * MANY}}),
        (CompletionBody, TEXT | {"prediction": dict.fromkeys(map(str, range(MANY)))}),
        (ChatBody, {"messages": [0] * MOST_MESSAGES}),
        (ChatBody, {"messages": [{"role": "user", "content": [0] * MANY}]}),
        (DetokenizeBody, {"tokens": [-1] * MANY}),
    ],
    ids=lambda value: next(reversed(value)) if isinstance(value, dict) else "",
)
def test_a_body_of_many_mistakes_is_not_told_each(kind, body):
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() <= 4


def test_an_unknown_model_is_404(plain):
    for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", TALK), ("/tokenize", {"prompt": "a"})):
        status, error = refusal(plain, path, body | {"model": "gpt-9"})
        assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")
    assert plain.send("GET", "/v1/models/gpt-9")[0] == 404


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nope", 404), ("GET", "/v1/completions", 405)])
def test_an_unknown_path_or_method_has_the_same_shape(plain, method, path, status):
    found, _, answer = plain.send(method, path)
    assert found == status
    assert answer["error"]["type"] == "invalid_request_error"


def test_a_body_that_is_too_large_is_413(plain):
    status, error = refusal(plain, "/v1/completions", json.dumps({"prompt": "a" * MOST_BODY_BYTES}))
    assert status == 413
    assert str(MOST_BODY_BYTES) in error["message"]


def test_a_body_that_says_no_length_is_cut_off_too(plain):
    connection = plain.connection()
    chunks = iter([b" " * (MOST_BODY_BYTES // 4)] * 5)
    connection.request("POST", "/v1/completions", chunks, {"Content-Type": "application/json"}, encode_chunked=True)
    response = connection.getresponse()
    assert response.status == 413
    assert "error" in json.loads(response.read())
    connection.close()


def test_headers_that_are_too_large_are_refused(plain):
    status, _, answer = plain.send("GET", "/health", headers={"X-Large": "a" * 100_000})
    assert status == 431
    assert "headers" in answer["error"]["message"]
    assert plain.send("GET", "/health")[0] == 200


def test_while_the_model_loads_the_answer_is_503(tmp_path):
    may_load = threading.Event()

    def load():
        may_load.wait(30)
        return chat_llm()

    lines = []
    server = Served(Server(load, ServerOptions(port=0), report=lines.append))
    thread = threading.Thread(target=server.server.run)
    thread.start()
    try:
        assert server.server.is_listening.wait(30)
        for method, path, body in (
            ("GET", "/health", None),
            ("GET", "/v1/models", None),
            ("POST", "/v1/completions", TEXT),
        ):
            status, headers, answer = server.send(method, path, body)
            assert (status, answer["error"]["type"]) == (503, "service_unavailable_error")
            assert int(headers["Retry-After"]) > 0
        assert server.send("GET", "/version")[0] == 200
        assert server.send("GET", "/metrics")[0] == 200
        assert lines == []
        may_load.set()
        assert server.server.is_ready.wait(30)
        assert server.send("GET", "/health")[0] == 200
        assert lines[-1].startswith("ready: http://127.0.0.1:")
    finally:
        may_load.set()
        server.server.stop()
        thread.join(30)


@pytest.mark.parametrize(
    "arguments",
    ["{", "5", "[]", "null", "NaN", "{'a': 1}", '{"a": ' * 100 + "1" + "}" * 100, '{"a": ' + "[" * 100_000, "1" * 5000],
)
def test_arguments_that_are_no_object_are_refused_with_their_place(plain, arguments):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]}]
    status, error = refusal(plain, "/v1/chat/completions", TALK | {"messages": messages})
    assert (status, error["param"]) == (400, "messages")
    assert error["message"].startswith("messages.1.tool_calls.0.function.arguments: ")
