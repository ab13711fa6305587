"""/v1/chat/completions through the openai client."""

from __future__ import annotations

import threading

import pytest

from forerun.server.completions import DEFAULT_MAX_TOKENS
from tests.server.served import CHAT, NAME, PROMPT, chat_ids, chat_llm, generate, offline, served


def create(server, messages=CHAT, **fields):
    fields = {"temperature": 0, "max_tokens": 16} | fields
    return server.client().chat.completions.create(model=NAME, messages=messages, **fields)


def expected(messages=CHAT, **sampling):
    return generate(chat_ids(messages), **sampling)


def test_the_answer_is_what_the_offline_engine_writes(either):
    answer = create(either)
    output = expected().outputs[0]
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    message = answer.choices[0].message
    assert (message.role, message.content) == ("assistant", output.text)
    assert answer.choices[0].finish_reason == output.finish_reason
    assert answer.usage.completion_tokens == len(output.token_ids)


def test_a_message_may_come_in_parts(plain):
    parts = [{"role": "user", "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]}]
    assert create(plain, parts).choices[0].message.content == create(plain).choices[0].message.content


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit_count(plain, name):
    fields = {"max_tokens": None, name: 3, "extra_body": {"ignore_eos": True}}
    assert create(plain, **fields).usage.completion_tokens == 3


def test_without_a_limit_there_is_as_much_as_fits(plain):
    answer = create(plain, max_tokens=None, extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens == offline().max_model_len
    assert answer.choices[0].finish_reason == "length"


def test_what_a_request_leaves_out_is_the_servers_default():
    defaults = {"temperature": 0, "repetition_penalty": 1.3, "max_new_tokens": 5}
    with served(chat_llm(override_generation_config=defaults)) as server:
        told = "temperature 0, repetition_penalty 1.3, max_tokens 5 (override_generation_config)"
        assert told in server.lines[0]
        body = {"messages": CHAT, "ignore_eos": True}
        answer = server.post("/v1/chat/completions", body)
        penalized = expected(max_tokens=5, repetition_penalty=1.3, ignore_eos=True).outputs[0]
        assert answer["choices"][0]["message"]["content"] == penalized.text
        assert answer["usage"]["completion_tokens"] == 5
        answer = server.post("/v1/chat/completions", {**body, "repetition_penalty": 1.0, "max_tokens": 8})
        assert answer["choices"][0]["message"]["content"] == expected(max_tokens=8, ignore_eos=True).outputs[0].text
        body = {"prompt": PROMPT, "ignore_eos": True}
        assert server.post("/v1/completions", body)["usage"]["completion_tokens"] == DEFAULT_MAX_TOKENS


def test_a_default_length_beyond_the_context_is_as_much_as_fits():
    with served(chat_llm(override_generation_config={"max_new_tokens": 10**6})) as server:
        fields = {"n": 2, "logprobs": True, "ignore_eos": True}
        answer = server.post("/v1/chat/completions", {"messages": CHAT, **fields})
        num_prompt = answer["usage"]["prompt_tokens"]
        assert answer["usage"]["completion_tokens"] == 2 * (offline().max_model_len - num_prompt)


def test_streamed_text_is_the_whole_text(either):
    chunks = list(create(either, stream=True))
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == expected().outputs[0].text
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant", *[None] * (len(chunks) - 1)]
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == expected().outputs[0].finish_reason


def test_several_answers_are_streamed_interleaved(either):
    fields = {"n": 3, "temperature": 1.0, "seed": 2, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
    whole = [choice.message.content for choice in create(either, **fields).choices]
    texts, roles, order = ["", "", ""], [], []
    for chunk in create(either, stream=True, **fields):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content
        roles += [choice.index] if choice.delta.role else []
        order.append(choice.index)
    assert texts == whole
    assert sorted(roles) == [0, 1, 2]
    assert order != sorted(order)


def test_logprobs_have_bytes_and_the_likeliest_tokens(either):
    answer = create(either, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    output = expected(logprobs=2).outputs[0]
    spellings = offline().get_tokenizer().vocabulary(offline().vocab_size).spellings
    for entry, row, token_id in zip(content, output.logprobs, output.token_ids, strict=True):
        assert entry.logprob == row[token_id].logprob
        assert bytes(entry.bytes) == spellings[token_id]
        best = sorted((e.logprob for e in row.values()), reverse=True)[:2]
        assert [top.logprob for top in entry.top_logprobs] == best
    text = b"".join(bytes(entry.bytes) for entry in content).decode(errors="replace")
    assert text.startswith(output.text.rstrip("\ufffd"))


def test_logprobs_without_alternatives(either):
    content = create(either, logprobs=True).choices[0].logprobs.content
    assert all(entry.top_logprobs == [] for entry in content)
    assert create(either).choices[0].logprobs is None


def test_streamed_logprobs_join_to_the_whole_ones(either):
    whole = create(either, logprobs=True, top_logprobs=1).choices[0].logprobs.content
    chunks = create(either, logprobs=True, top_logprobs=1, stream=True)
    assert [entry for chunk in chunks for entry in chunk.choices[0].logprobs.content] == whole


def test_token_ids_are_given_where_asked_for(plain):
    fields = {"extra_body": {"return_token_ids": True}}
    answer = create(plain, **fields)
    assert answer.prompt_token_ids == chat_ids(CHAT)
    assert answer.choices[0].token_ids == expected().outputs[0].token_ids
    chunks = list(create(plain, stream=True, **fields))
    assert chunks[0].prompt_token_ids == chat_ids(CHAT)
    assert "prompt_token_ids" not in chunks[1].model_extra


def test_a_last_message_can_be_continued(plain):
    messages = [*CHAT, {"role": "assistant", "content": "I am"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    answer = plain.post("/v1/chat/completions", {**body, "max_tokens": 1, "return_token_ids": True})
    tokenizer = offline().get_tokenizer()
    assert tokenizer.decode(answer["prompt_token_ids"], skip_special_tokens=False).endswith("assistant\nI am")


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "messages", "made_up"])
def test_only_variables_of_the_template_are_taken(plain, name):
    body = {"messages": CHAT, "chat_template_kwargs": {name: True}}
    status, _, answer = plain.send("POST", "/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, "chat_template_kwargs")


def test_an_image_is_refused_and_not_fetched(plain):
    parts = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}]
    status, _, answer = plain.send("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]})
    assert (status, answer["error"]["param"]) == (400, "messages")


def test_what_tokens_spell_is_read_while_others_are_served(plain, monkeypatch):
    tokenizer, threads = plain.llm.get_tokenizer(), []
    read = type(tokenizer).vocabulary

    def vocabulary(*arguments):
        threads.append(threading.current_thread().name)
        return read(*arguments)

    monkeypatch.setattr(type(tokenizer), "vocabulary", vocabulary)
    vars(plain.model).pop("spellings", None)
    assert create(plain, logprobs=True).choices[0].logprobs.content
    (name,) = threads
    assert name.startswith("forerun-intake")
