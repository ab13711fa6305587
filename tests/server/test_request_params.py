"""Fields of requests: what is refused, what asks for nothing, and what does not fit the rest."""

from __future__ import annotations

import pytest

from forerun.errors import RequestError
from forerun.server.errors import ApiError
from forerun.server.protocol import ChatBody, CompletionBody, TokenizeChatBody
from forerun.server.request_params import of_format, refuse_unserved, sampling_params

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
    ],
)
def test_their_neutral_values_are_taken(fields):
    refuse_unserved(ChatBody(messages=MESSAGES, **fields))


def test_completions_have_two_of_them_themselves():
    refuse_unserved(CompletionBody(prompt="hello", echo=True, add_special_tokens=True))


@pytest.mark.parametrize("body", [{"stream": False}, {"stream": None}, {}])
def test_options_of_a_stream_are_for_streams(body):
    fields = {"stream_options": {"include_usage": True}, **body}
    for asked in (ChatBody(messages=MESSAGES, **fields), CompletionBody(prompt="hello", **fields)):
        with pytest.raises(ApiError, match="stream_options: is given without stream") as caught:
            sampling_params(asked, structure=None, speculates=False)
        assert (caught.value.status_code, caught.value.param) == (400, "stream_options")
    streamed = CompletionBody(prompt="hello", **(fields | {"stream": True}))
    assert sampling_params(streamed, structure=None, speculates=False).n == 1


def test_errors_of_a_structure_name_the_field_that_it_came_from():
    error = RequestError("json: cannot be compiled (it is empty); mend or simplify it")
    sent = {"response_format": {"type": "json_object"}}
    assert str(of_format(error, CompletionBody(prompt="hello", **sent))) == f"response_format: {error}"
    for other in ({"structured_outputs": {"json": {}}}, {}):
        assert of_format(error, CompletionBody(prompt="hello", **other)) is error
    unlike = RequestError("prompt: is empty; give one")
    assert of_format(unlike, CompletionBody(prompt="hello", **sent)) is unlike
