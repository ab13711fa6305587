"""OpenAI's `prediction`: checked, drafted, counted in the usage, and without effect on the text."""

from __future__ import annotations

import pytest

from tests.contract.drafters import NGRAM
from tests.server.served import CHAT, PROMPT, chat_llm, offline, served

LETTERS = offline().get_tokenizer().encode("abcdefgijklmnop")  # each is a token, whatever stands around it
BODY = {"messages": CHAT, "temperature": 0, "max_tokens": 24, "allowed_token_ids": LETTERS}
PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server():
    with served(chat_llm(NGRAM, max_model_len=1024), per_request_spec_decode_metrics="detailed") as it:
        yield it


@pytest.fixture(scope="module")
def text(plain):
    """What the model writes."""
    return plain.post(PATH, BODY)["choices"][0]["message"]["content"]


def content(text):
    return {"type": "content", "content": text}


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def details(answer):
    return answer["usage"]["completion_tokens_details"]


def test_a_right_prediction_is_accepted(server, text):
    answer = server.post(PATH, BODY | {"prediction": content(text)})
    assert answer["choices"][0]["message"]["content"] == text
    # each step but the first has a draft of four, and adds a token of the target's own
    assert details(answer) == {"accepted_prediction_tokens": 24 - 6, "rejected_prediction_tokens": 0}


def test_a_wrong_prediction_is_rejected(server, text):
    answer = server.post(PATH, BODY | {"prediction": content(text[:2] + "Ω" * 99)})
    assert answer["choices"][0]["message"]["content"] == text
    assert details(answer)["accepted_prediction_tokens"] == 1
    assert details(answer)["rejected_prediction_tokens"] == 3


def test_a_prediction_that_is_wrong_from_its_first_token_on_costs_nothing(server, text):
    answer = server.post(PATH, BODY | {"prediction": content("Ω" * 99)})
    assert answer["choices"][0]["message"]["content"] == text
    assert details(answer) == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}


def test_the_usage_says_what_the_metrics_say(server, text):
    answer = server.post(PATH, BODY | {"prediction": content(text[:9] + "!" + text[9:])})
    earned = answer["metrics"]["speculative_decoding"]["by_drafter"]["prediction"]
    assert details(answer)["accepted_prediction_tokens"] == earned["num_accepted_draft_tokens"] > 0
    assert sum(details(answer).values()) == earned["num_draft_tokens"]


def test_each_step_names_its_drafter(server, text):
    metrics = server.post(PATH, BODY | {"prediction": content(text)})["metrics"]["speculative_decoding"]
    by_drafter = metrics["by_drafter"]
    assert set(metrics["per_step_drafter"]) == set(by_drafter) >= {"prediction"}
    for drafter, earned in by_drafter.items():
        assert metrics["per_step_drafter"].count(drafter) == earned["num_spec_steps"]
    for count in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"):
        assert sum(earned[count] for earned in by_drafter.values()) == metrics[count]


def test_tokens_of_a_prediction_name_it_as_their_drafter(server, text):
    body = BODY | {"prediction": content(text), "forerun": {"origins": True}}
    pieces = server.post(PATH, body)["choices"][0]["forerun"]["pieces"]
    assert "prediction" in {piece["drafter"] for piece in pieces if piece["origin"] == "accepted"}


def test_parts_are_one_text(server, text):
    whole = server.post(PATH, BODY | {"prediction": content(text)})
    pieces = server.post(PATH, BODY | {"prediction": content(parts(text[:7], text[7:]))})
    assert details(pieces) == details(whole)


def test_a_stream_tells_it_with_its_usage(server, text):
    body = BODY | {"prediction": content(text)}
    *_, last = server.stream(PATH, body | {"stream_options": {"include_usage": True}})
    assert details(last) == details(server.post(PATH, body))


def test_openais_client_sends_and_reads_it(server, text):
    answer = server.client().chat.completions.create(
        **{name: BODY[name] for name in ("messages", "temperature", "max_tokens")},
        model="tiny",
        prediction={"type": "content", "content": text},
        extra_body={"allowed_token_ids": LETTERS},
    )
    assert answer.choices[0].message.content == text
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens > 0


def test_text_completions_take_it_too(server):
    body = {"prompt": PROMPT, **BODY}
    del body["messages"]
    free = server.post("/v1/completions", body)
    predicted = server.post("/v1/completions", body | {"prediction": content(free["choices"][0]["text"])})
    assert predicted["choices"][0]["text"] == free["choices"][0]["text"]
    assert details(predicted)["accepted_prediction_tokens"] > 0


@pytest.mark.parametrize("nothing", [None, content(""), content([])])
def test_an_empty_prediction_changes_nothing(server, text, nothing):
    answer = server.post(PATH, BODY | {"prediction": nothing})
    assert answer["choices"][0]["message"]["content"] == text
    if nothing is None:
        assert "completion_tokens_details" not in answer["usage"]
    else:
        assert details(answer) == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2, "temperature": 1, "seed": 3},
        {"logprobs": True, "top_logprobs": 2},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"max_completion_tokens": 12},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "required", "allowed_token_ids": None},
        {"response_format": {"type": "json_object"}, "allowed_token_ids": None},
        {"stop": "e"},
        {"forerun": {"speculation": "off"}},
    ],
    ids=lambda more: "+".join(more),
)
def test_it_goes_with_everything_that_openai_does_not_combine_it_with(server, text, more):
    free = server.post(PATH, BODY | more)
    predicted = server.post(PATH, BODY | more | {"prediction": content(text)})
    for one, other in zip(predicted["choices"], free["choices"], strict=True):
        for choice in (one, other):
            for call in choice["message"].get("tool_calls", ()):
                del call["id"]
        assert one == other
    assert predicted["usage"]["completion_tokens"] == free["usage"]["completion_tokens"]


def test_without_a_drafter_nothing_is_drafted(plain, text):
    answer = plain.post(PATH, BODY | {"prediction": content(text)})
    assert answer["choices"][0]["message"]["content"] == text
    assert details(answer) == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}


@pytest.mark.parametrize(
    "prediction",
    [
        "text",
        {},
        {"content": "text"},
        {"type": "content"},
        {"type": "content", "content": None},
        {"type": "content", "content": 5},
        {"type": "text", "content": "text"},
        {"type": "content", "content": "text", "strength": 1},
        {"type": "content", "content": ["text"]},
        {"type": "content", "content": [{"type": "text"}]},
        {"type": "content", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"type": "content", "content": "a" * 1025},
        '{"type": "content", "content": "text"}',
        [content("text")],
    ],
    ids=lambda prediction: f"{prediction!r:.50}",
)
def test_anything_else_is_refused_by_its_name(server, prediction):
    status, _, refused = server.send("POST", PATH, BODY | {"prediction": prediction})
    assert status == 400, refused
    assert "prediction" in refused["error"]["message"]
    assert refused["error"]["param"].startswith("prediction")


def test_half_a_character_is_refused(server):
    body = '{"messages": [{"role": "user", "content": "a"}], "prediction": {"type": "content", "content": "\\ud800"}}'
    status, _, refused = server.send("POST", PATH, body)
    assert (status, refused["error"]["type"]) == (400, "invalid_request_error"), refused
