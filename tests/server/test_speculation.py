"""Speculation per request: asked for, reported, and without effect on the text."""

from __future__ import annotations

import pytest

from tests.contract.drafters import NGRAM
from tests.server.served import CHAT, PROMPT, chat_llm, generate, served

BODY = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24, "ignore_eos": True}


def answer(server, own=None, **fields):
    return server.post("/v1/completions", BODY | fields | ({"forerun": own} if own else {}))


def reported(answer):
    return answer["metrics"]["speculative_decoding"]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}])
def test_drafts_do_not_change_the_text(drafting, sampling):
    texts = {
        answer(drafting, own, **sampling)["choices"][0]["text"]
        for own in (None, {"speculation": "on"}, {"speculation": "off"}, {"num_speculative_tokens": 1})
    }
    assert len(texts) == 1


def test_a_request_may_turn_drafts_off_or_cap_them(drafting):
    assert reported(answer(drafting))["num_draft_tokens"] > 0
    assert reported(answer(drafting, {"speculation": "off"}))["num_draft_tokens"] == 0
    capped = reported(answer(drafting, {"speculation": "on", "num_speculative_tokens": 2}))
    assert set(capped["per_step_drafted"]) == {2}


def test_metrics_are_in_vllms_words(drafting):
    metrics = reported(answer(drafting))
    stats_free = generate(PROMPT, max_tokens=24, ignore_eos=True).outputs[0]
    assert answer(drafting)["choices"][0]["text"] == stats_free.text
    histogram = metrics["acceptance_histogram"]
    assert len(histogram) == metrics["num_spec_tokens"] + 1 == 5
    assert sum(histogram) == metrics["num_spec_steps"] == len(metrics["per_step_drafted"])
    assert sum(j * n for j, n in enumerate(histogram)) == metrics["num_accepted_draft_tokens"]
    assert [metrics["per_step_accepted"].count(j) for j in range(5)] == histogram
    assert sum(metrics["per_step_drafted"]) == metrics["num_draft_tokens"]
    assert metrics["mean_acceptance_length"] == 1 + metrics["num_accepted_draft_tokens"] / metrics["num_spec_steps"]
    assert metrics["draft_acceptance_rate"] == metrics["num_accepted_draft_tokens"] / metrics["num_draft_tokens"]


def test_a_stream_tells_of_drafts_with_its_usage(drafting):
    events = drafting.stream("/v1/completions", BODY | {"stream_options": {"include_usage": True}})
    assert reported(events[-1]) == reported(answer(drafting))
    assert all("metrics" not in event for event in events[:-1])


def test_metrics_are_null_for_several_completions(drafting):
    assert answer(drafting, n=2)["metrics"] is None


@pytest.mark.parametrize(("level", "has_steps"), [("none", None), ("summary", False)])
def test_the_server_says_how_much_is_told(level, has_steps):
    with served(chat_llm(NGRAM), per_request_spec_decode_metrics=level) as server:
        found = answer(server)
        assert ("metrics" in found) is (has_steps is not None)
        assert has_steps is None or "per_step_drafted" not in reported(found)


def test_a_server_without_a_drafter_tells_nothing_and_cannot_be_made_to_draft(plain):
    assert "metrics" not in answer(plain)
    status, _, refused = plain.send("POST", "/v1/completions", BODY | {"forerun": {"speculation": "on"}})
    assert (status, refused["error"]["param"]) == (400, "forerun")
    assert answer(plain, {"speculation": "off"})["choices"]


# --- origins --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_origins_say_how_each_token_came_to_be(drafting, path):
    body = BODY | {"messages": CHAT, "forerun": {"origins": True}, "return_token_ids": True}
    body.pop("prompt" if "chat" in path else "messages")
    whole = drafting.post(path, body)["choices"][0]
    own = whole["forerun"]
    assert len(own["origins"]) == len(whole["token_ids"]) == 24
    assert set(own["origins"]) == {"accepted", "recovered", "bonus"}
    assert "".join(piece["text"] for piece in own["pieces"]) == _text(whole)
    for piece in own["pieces"]:
        assert (piece["drafter"] is None) == (piece["position"] is None)
        assert piece["origin"] != "accepted" or piece["drafter"] == "OracleTreeDrafter"

    events = drafting.stream(path, body)
    choices = [event["choices"][0] for event in events]
    assert [origin for choice in choices for origin in choice["forerun"]["origins"]] == own["origins"]
    assert [piece for choice in choices for piece in choice["forerun"]["pieces"]] == own["pieces"]
    assert all(len(choice["forerun"]["origins"]) == len(choice["token_ids"]) for choice in choices)
    assert all("".join(p["text"] for p in choice["forerun"]["pieces"]) == _text(choice) for choice in choices)


def _text(choice):
    message = choice.get("message") or choice.get("delta")
    return choice["text"] if message is None else message["content"]


def test_origins_of_many_choices_belong_to_the_right_ones(drafting):
    body = BODY | {"prompt": [PROMPT, "abc"], "n": 2, "temperature": 1, "seed": 1, "forerun": {"origins": True}}
    choices = drafting.post("/v1/completions", body)["choices"]
    assert len({choice["text"] for choice in choices}) == 4
    for choice in choices:
        assert "".join(piece["text"] for piece in choice["forerun"]["pieces"]) == choice["text"]


def test_an_echo_without_an_answer_has_no_origins(either):
    body = {"prompt": [PROMPT, "abc"], "n": 2, "echo": True, "max_tokens": 0, "forerun": {"origins": True}}
    for choice in either.post("/v1/completions", body)["choices"]:
        assert choice["text"] in body["prompt"]
        nothing = {"origins": [], "num_draft_tokens": 0, "num_accepted_tokens": 0, "pieces": []}
        assert choice["forerun"] == nothing


def test_origins_are_not_told_unasked(drafting):
    assert "forerun" not in answer(drafting)["choices"][0]


def test_off_with_a_number_of_tokens_contradicts_itself(drafting):
    own = {"speculation": "off", "num_speculative_tokens": 3}
    status, _, refused = drafting.send("POST", "/v1/completions", BODY | {"forerun": own})
    assert (status, refused["error"]["param"]) == (400, "forerun")
