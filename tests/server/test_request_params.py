"""Fields of requests: what is refused, what asks for nothing, and what does not fit the rest."""

from __future__ import annotations

import pytest

from forerun.core.sampling_params import SamplingParams
from forerun.errors import RequestError, UnknownKeyError
from forerun.server import request_params
from forerun.server.errors import ApiError
from forerun.server.protocol import ChatBody, CompletionBody, TokenizeChatBody
from forerun.server.request_params import (
    LENIENT,
    in_clients_words,
    refuse_unserved,
    sampling_params,
    wanted_structure,
)

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_logprobs": 1},
        {"prompt_logprobs": 0},
        {"return_tokens_as_token_ids": True},
        {"echo": True},
        {"add_special_tokens": True},
        {"spaces_between_special_tokens": False},
        {"web_search_options": {}},
        {"truncate_prompt_tokens": 0},
        {"thinking_token_budget": 0},
        {"logprob_token_ids": [1]},
        {"repetition_detection": {"max_pattern_size": 8}},
        {"repeat_penalty": 1.1},
        {"mirostat": 2},
    ],
)
def test_fields_that_would_change_the_answer_are_refused(fields):
    (name,) = fields
    for kind in (ChatBody, TokenizeChatBody):
        with pytest.raises(ApiError, match=f"{name}: is not served") as caught:
            refuse_unserved(kind(messages=MESSAGES, **fields))
        assert (caught.value.status_code, caught.value.param) == (400, name)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_logprobs": None, "web_search_options": None, "modalities": ["text"]},
        {"return_tokens_as_token_ids": False, "echo": False, "add_special_tokens": False, "modalities": []},
        {"spaces_between_special_tokens": True, "tools": []},
        {"repeat_penalty": 1, "typical_p": 1.0, "mirostat": 0, "dry_multiplier": 0.0, "xtc_probability": 0},
    ],
)
def test_their_neutral_values_are_taken(fields):
    refuse_unserved(ChatBody(messages=MESSAGES, **fields))


def test_a_misspelt_field_is_warned_of_though_it_is_0(caplog, monkeypatch):
    monkeypatch.setattr(request_params, "_warned", set())
    refuse_unserved(ChatBody(messages=MESSAGES, temperture_of_this_test=0))
    assert "temperture_of_this_test" in caplog.text


def test_completions_have_two_of_them_themselves():
    refuse_unserved(CompletionBody(prompt="hello", echo=True, add_special_tokens=True))


@pytest.mark.parametrize("body", [{"stream": False}, {"stream": None}, {}])
def test_options_of_a_stream_are_for_streams(body):
    fields = {"stream_options": {"include_usage": True}, **body}
    for asked in (ChatBody(messages=MESSAGES, **fields), CompletionBody(prompt="hello", **fields)):
        with pytest.raises(ApiError, match="stream_options: is given without stream") as caught:
            sampling_params(asked, structure=None, speculates=False, saves_hidden_states=False, defaults={})
        assert (caught.value.status_code, caught.value.param) == (400, "stream_options")
    streamed = CompletionBody(prompt="hello", **(fields | {"stream": True}))
    assert sampling_params(streamed, structure=None, speculates=False, saves_hidden_states=False, defaults={}).n == 1


def test_an_empty_schema_is_one_and_not_no_field():
    assert wanted_structure(CompletionBody(prompt="hello", structured_outputs={"json": {}})) == {"json": {}}
    named = {"type": "json_schema", "json_schema": {"schema": {}}}
    assert wanted_structure(CompletionBody(prompt="hello", response_format=named)) == {
        "json": {"x-guidance": {"lenient": True}}
    }
    for name in ("guided_json", "json_schema"):
        with pytest.raises(ApiError, match=f"{name}: answers cannot be constrained so"):
            refuse_unserved(CompletionBody(prompt="hello", **{name: {}}))
        refuse_unserved(CompletionBody(prompt="hello", **{name: None}))


@pytest.mark.parametrize(
    ("strict", "options"),
    [({"strict": True}, {}), ({"strict": False}, LENIENT), ({"strict": None}, LENIENT), ({}, LENIENT)],
)
def test_only_a_strict_schema_is_followed_to_the_letter(strict, options):
    schema = {"type": "array", "uniqueItems": True}
    sent = {"type": "json_schema", "json_schema": {"name": "list", "schema": schema, **strict}}
    assert wanted_structure(CompletionBody(prompt="hello", response_format=sent)) == {"json": schema | options}


def test_a_schemas_own_options_of_llguidance_count():
    schema = {"type": "array", "x-guidance": {"whitespace_flexible": False}}
    sent = {"type": "json_schema", "json_schema": {"schema": schema}}
    assert wanted_structure(CompletionBody(prompt="hello", response_format=sent)) == {"json": schema}


def test_strict_is_true_or_false():
    sent = {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}
    with pytest.raises(ApiError, match=r"response_format: got json_schema\.strict 'yes'; must be true or false"):
        wanted_structure(CompletionBody(prompt="hello", response_format=sent))


def test_fields_that_are_left_out_have_the_servers_defaults():
    defaults = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1, "max_tokens": 500}

    def params(**fields):
        body = CompletionBody(prompt="hello", **fields)
        return sampling_params(
            body, structure=None, speculates=False, saves_hidden_states=False, defaults=defaults, max_tokens=16
        )

    assert params() == SamplingParams(temperature=0.6, top_k=20, repetition_penalty=1.1, max_tokens=16)
    given = {"temperature": 1.0, "top_k": 0, "top_p": 0.5}
    assert params(**given) == SamplingParams(**given, repetition_penalty=1.1, max_tokens=16)
    assert params(top_k=None).top_k == 20


@pytest.mark.parametrize("format_of_text", [{"type": "text"}, {"type": "text", "more": 1}])
def test_a_format_of_text_asks_for_nothing(format_of_text):
    sent = {"response_format": format_of_text}
    assert wanted_structure(CompletionBody(prompt="hello", **sent)) is None
    beside = {"structured_outputs": {"regex": "a"}}
    assert wanted_structure(CompletionBody(prompt="hello", **sent, **beside)) == {"regex": "a"}
    error = RequestError("regex: cannot be compiled")
    told = in_clients_words(error, CompletionBody(prompt="hello", **sent, **beside))
    assert str(told) == "structured_outputs.regex: cannot be compiled"


@pytest.mark.parametrize(
    ("sent", "error", "told"),
    [
        ({"response_format": {"type": "json_schema"}}, "json: is bad", "response_format.json_schema.schema: is bad"),
        ({"response_format": {"type": "json_object"}}, "json_object: is bad", "response_format: is bad"),
        ({"response_format": {"type": "regex"}}, "regex: is bad", "response_format.regex: is bad"),
        ({"response_format": {"type": "structural_tag"}}, "structural_tag: is bad", "response_format: is bad"),
        ({"response_format": {"type": "regex"}}, "structured_outputs: needs a token", "response_format: needs a token"),
        (
            {"response_format": {"type": "regex"}},
            "ignore_eos: got True with structured_outputs, where",
            "ignore_eos: got True with response_format, where",
        ),
        ({"structured_outputs": {}}, "json_object: got False", "structured_outputs.json_object: got False"),
        ({"structured_outputs": {}}, "whitespace_pattern: got 5", "structured_outputs.whitespace_pattern: got 5"),
        ({"structured_outputs": {}}, "structured_outputs: got none", "structured_outputs: got none"),
        ({"kv_transfer_params": {}}, "hidden_states_path: got 5", "kv_transfer_params.hidden_states_path: got 5"),
        ({"prompt": "\ud800"}, "text: got half of a pair", "prompt: got half of a pair"),
        ({"prediction": {"type": "content", "content": "\ud800"}}, "text: got half", "prediction: got half"),
        ({}, "stop: is empty; leave it out", "stop: is empty; leave it out"),
    ],
)
def test_errors_name_the_field_that_the_client_wrote(sent, error, told):
    assert str(in_clients_words(RequestError(error), CompletionBody(**{"prompt": "hello"} | sent))) == told


def test_errors_of_a_conversation_name_the_field_that_the_client_wrote():
    tool = {"type": "function", "function": {"name": "f", "description": "\ud800"}}
    half = RequestError("text: got half")
    assert str(in_clients_words(half, ChatBody(messages=MESSAGES, tools=[tool]))) == "tools: got half"
    content = [{"role": "user", "content": "\ud800"}]
    for body in (ChatBody(messages=content), TokenizeChatBody(messages=content)):
        assert str(in_clients_words(half, body)) == "messages: got half"
    body = ChatBody(messages=MESSAGES, tools=[tool], response_format={"type": "json_object"})
    for error in ("structural_tag: is bad", "structured_outputs: is bad"):
        assert str(in_clients_words(RequestError(error), body, has_tools=True)) == "tools: is bad"


def test_an_unknown_key_is_told_of_the_field_that_has_it():
    body = CompletionBody(prompt="hello", structured_outputs={"jsn": {}})
    with pytest.raises(UnknownKeyError) as caught:
        sampling_params(
            body, structure=wanted_structure(body), speculates=False, saves_hidden_states=False, defaults={}
        )
    assert str(in_clients_words(caught.value, body)).startswith("structured_outputs: unknown key 'jsn'")


def test_what_is_to_be_saved_is_refused_where_nothing_is():
    body = CompletionBody(prompt="hello", kv_transfer_params={"include_output_tokens": True})
    with pytest.raises(ApiError, match="kv_transfer_params: is given, but this server saves no") as caught:
        sampling_params(body, structure=None, speculates=False, saves_hidden_states=False, defaults={})
    assert (caught.value.status_code, caught.value.param) == (400, "kv_transfer_params")
    assert (
        sampling_params(body, structure=None, speculates=False, saves_hidden_states=True, defaults={}).kv_transfer
        is not None
    )
