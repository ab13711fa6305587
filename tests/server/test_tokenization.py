"""/tokenize, /detokenize, /tokenizer_info, and what the server says of itself."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import forerun
from forerun.server import json_parts
from forerun.server.protocol import MOST_DETOKENIZED
from forerun.server.request_params import _warned
from forerun.server.served_model import NUM_INTAKE_THREADS, NUM_TOKENIZATION_THREADS
from tests.server.served import CHAT, NAME, PROMPT, chat_ids, offline, served
from tests.server.test_load import until
from tests.server.tool_models import tool_llm, tool_target
from tests.tiny_tokenizer import CHAT_TEMPLATE


def test_a_text_is_tokenised(plain):
    answer = plain.post("/tokenize", {"model": NAME, "prompt": "hello", "return_token_strs": True})
    assert answer == {
        "count": 4,
        "max_model_len": 256,
        "tokens": [259, 78, 78, 81],
        "token_strs": ["he", "l", "l", "o"],
    }


def test_a_long_answer_is_written_part_by_part(plain, monkeypatch):
    written, write = [], json_parts.to_json
    expected = plain.post("/tokenize", {"prompt": "hello \u2713", "return_token_strs": True})
    monkeypatch.setattr(json_parts, "ENTRIES_AT_ONCE", 3)
    body = {"prompt": "hello \u2713", "return_token_strs": True}
    monkeypatch.setattr(json_parts, "to_json", lambda value: written.append(value) or write(value))
    assert plain.post("/tokenize", body) == expected
    assert max(len(part) for part in written if isinstance(part, list)) == 3


def test_a_conversation_is_tokenised(plain):
    answer = plain.post("/tokenize", {"messages": CHAT})
    assert answer["tokens"] == chat_ids(CHAT)
    assert answer["token_strs"] is None
    shorter = plain.post("/tokenize", {"messages": CHAT, "add_generation_prompt": False})
    assert shorter["tokens"] == offline().get_tokenizer().apply_chat_template(CHAT, add_generation_prompt=False)


def test_developer_is_the_systems_role_where_the_template_has_no_other_for_it(plain):
    said = {"content": "be kind"}
    tokens = plain.post("/tokenize", {"messages": [{"role": "developer", **said}, *CHAT]})["tokens"]
    assert tokens == chat_ids([{"role": "system", **said}, *CHAT])


def test_a_template_that_reads_them_gets_the_developers_role_and_the_effort():
    effort = "{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}"
    with served(tool_llm(tool_target(effort + CHAT_TEMPLATE + "{# system or developer #}"))) as server:
        asked = {"messages": [{"role": "developer", "content": "be kind"}], "add_generation_prompt": False}
        for more, expected in (
            ({}, ""),
            ({"reasoning_effort": "high"}, "high"),
            ({"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low"}}, "low"),
        ):
            tokens = server.post("/tokenize", asked | more)["tokens"]
            text = server.post("/detokenize", {"tokens": tokens})["prompt"]
            assert text == f"{expected}<|im_start|>developer\nbe kind<|im_end|>\n"


def test_an_effort_that_the_template_does_not_read_is_ignored_with_a_warning(plain, caplog):
    _warned.clear()
    assert plain.post("/tokenize", {"messages": CHAT, "reasoning_effort": "high"})["tokens"] == chat_ids(CHAT)
    assert "'reasoning_effort'" in caplog.text


def test_token_ids_become_text_again(plain):
    tokens = plain.post("/tokenize", {"prompt": "héllo <|im_end|> ✓"})["tokens"]
    assert plain.post("/detokenize", {"tokens": tokens}) == {"prompt": "héllo <|im_end|> ✓"}
    assert plain.post("/detokenize", {"tokens": []}) == {"prompt": ""}


def test_a_token_that_is_none_is_refused(plain):
    for tokens in ([9999], [-1], ["a"], 5):
        assert plain.send("POST", "/detokenize", {"tokens": tokens})[0] == 400
    assert plain.send("POST", "/tokenize", {"nothing": 1})[0] == 400


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": [{"role": "", "content": "a"}]}, "messages.0.role: string should have at least 1 character"),
        ({"messages": 5}, "messages: input should be a valid list"),
        ({"prompt": 5}, "prompt: input should be a valid string"),
        ({"messages": None}, "prompt: is missing; give one"),
    ],
)
def test_a_mistake_is_told_of_the_kind_that_was_sent(plain, body, message):
    status, _, answer = plain.send("POST", "/tokenize", body)
    assert (status, answer["error"]["message"], answer["error"]["param"]) == (
        400,
        message,
        message.split(".")[0].split(":")[0],
    )


def test_a_long_text_is_tokenised_while_others_are_served(plain):
    text = "hello " * 200_000
    assert plain.post("/tokenize", {"prompt": text})["count"] == 5 * 200_000
    assert plain.send("GET", "/health")[0] == 200


def test_who_has_texts_tokenised_keeps_no_request_waiting(plain, monkeypatch):
    tokenizer, begun, goes_on = plain.llm.get_tokenizer(), [], threading.Event()
    encode = type(tokenizer).encode

    def slow(self, text, **more):
        if text == "slow":
            begun.append(text)
            goes_on.wait(10)
        return encode(self, text, **more)

    monkeypatch.setattr(type(tokenizer), "encode", slow)
    with ThreadPoolExecutor(NUM_INTAKE_THREADS) as clients:
        asked = [clients.submit(plain.post, "/tokenize", {"prompt": "slow"}) for _ in range(NUM_INTAKE_THREADS)]
        until(lambda: len(begun) >= NUM_TOKENIZATION_THREADS)
        time.sleep(0.1)  # for those that would begin where all share the threads
        assert plain.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1})["choices"]
        assert not any(answer.done() for answer in asked)
        goes_on.set()
    assert all(answer.result()["count"] == 4 for answer in asked)


def test_more_tokens_than_any_text_has_are_not_decoded(plain):
    status, _, answer = plain.send("POST", "/detokenize", {"tokens": [70] * (MOST_DETOKENIZED + 1)})
    assert (status, answer["error"]["param"]) == (400, "tokens")


def test_the_tokenizer_is_described_where_that_is_allowed(plain, drafting):
    _, _, info = plain.send("GET", "/tokenizer_info")
    assert (info["eos_token"], info["bos_token"]) == ("<|im_end|>", "<|endoftext|>")
    assert "im_start" in info["chat_template"]
    assert drafting.send("GET", "/tokenizer_info")[0] == 404


def test_the_model_is_described(plain):
    (card,) = plain.client().models.list().data
    assert (card.id, card.object, card.owned_by) == (NAME, "model", "forerun")
    assert card.root
    assert card.max_model_len == 256
    assert plain.client().models.retrieve(NAME) == card
    assert plain.send("GET", "/version")[2] == {"version": forerun.__version__}


def test_the_openapi_description_names_every_endpoint(plain):
    status, _, description = plain.send("GET", "/openapi.json")
    assert status == 200
    assert {"/health", "/v1/models", "/v1/completions", "/v1/chat/completions", "/tokenize"} <= set(
        description["paths"]
    )
    responses = description["paths"]["/v1/completions"]["post"]["responses"]
    assert {"200", "4XX", "5XX"} == set(responses)
    assert plain.send("GET", "/docs")[0] == 404


def test_the_banner_says_what_is_served(plain, drafting):
    banner, ready = drafting.lines
    for part in ("target", "drafter", "OracleTreeDrafter, K=4", "bfloat16", "KV memory", "256", "64"):
        assert part in banner
    assert "no speculation" in plain.lines[0]
    assert "sampling defaults       temperature 1\n" in plain.lines[0]
    assert ready == f"ready: {drafting.url} (Ctrl-C stops)"
