"""/v1/completions through the openai client: every field, and the same text as offline."""

from __future__ import annotations

import asyncio

import pytest

from forerun import SamplingParams
from forerun.models.tokenizer import load_tokenizer
from forerun.server import completions, json_parts
from forerun.server.completions import CompletionBuilder, prompt_offsets
from tests.engines import EOS
from tests.server.served import NAME, PROMPT, generate, offline
from tests.tiny_tokenizer import save_tiny_tokenizer


def create(server, prompt=PROMPT, **fields):
    fields = {"temperature": 0, "extra_body": {}} | fields
    return server.client().completions.create(model=NAME, prompt=prompt, **fields)


def test_the_answer_is_what_the_offline_engine_writes(either):
    answer = create(either, max_tokens=24)
    expected = generate(PROMPT, max_tokens=24).outputs[0]
    assert answer.object == "text_completion"
    assert answer.model == NAME
    assert answer.id.startswith("cmpl-")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected.text, expected.finish_reason)
    assert answer.usage.prompt_tokens == 9
    assert answer.usage.completion_tokens == len(expected.token_ids)
    assert answer.usage.total_tokens == 9 + len(expected.token_ids)


def test_sixteen_tokens_are_written_where_nothing_else_is_said(plain):
    assert create(plain, extra_body={"ignore_eos": True}).usage.completion_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.8, "seed": 7, "top_p": 0.9},
        {"temperature": 1.2, "seed": -3, "extra_body": {"top_k": 20, "min_p": 0.01}},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "extra_body": {"repetition_penalty": 1.2}},
        {"logit_bias": {"80": 50.0}},
        {"extra_body": {"bad_words": ["k"], "ignore_eos": True, "min_tokens": 3}},
        {"extra_body": {"allowed_token_ids": [70, 71, 72, 73]}},
        {"extra_body": {"stop_token_ids": [198], "include_stop_str_in_output": True}},
        {"extra_body": {"skip_special_tokens": False, "logit_bias": {"0": 60}, "ignore_eos": True}},
    ],
)
def test_every_sampling_field_means_what_it_means_offline(either, fields, stream):
    named = {name: value for name, value in fields.items() if name != "extra_body"} | fields.get("extra_body", {})
    if "logit_bias" in named:
        named["logit_bias"] = {int(key): value for key, value in named["logit_bias"].items()}
    expected = generate(PROMPT, **named).outputs[0]
    answer = create(either, stream=stream, **fields)
    if stream:
        assert "".join(chunk.choices[0].text for chunk in answer) == expected.text
    else:
        assert answer.choices[0].text == expected.text
        assert answer.choices[0].stop_reason == expected.stop_reason


def test_null_is_the_same_as_leaving_a_field_out(plain):
    body = {"prompt": PROMPT, "temperature": 0}
    nulls = dict.fromkeys(("n", "top_p", "seed", "stop", "max_tokens", "logprobs", "echo", "stream", "user", "forerun"))
    one, other = (plain.post("/v1/completions", given) for given in (body, body | nulls))
    assert one["choices"] == other["choices"]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("as_list", [False, True])
def test_a_stop_string_ends_the_text(either, include, as_list):
    prompt = "abc"
    free = generate(prompt, max_tokens=32, ignore_eos=True, temperature=1.0, seed=4).outputs[0].text
    stop = free[5:7]
    answer = create(
        either,
        prompt,
        stop=[stop, "never"] if as_list else stop,
        max_tokens=32,
        temperature=1.0,
        seed=4,
        extra_body={"ignore_eos": True, "include_stop_str_in_output": include},
    )
    assert answer.choices[0].text == free[: free.index(stop) + len(stop) * include]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == stop


@pytest.mark.parametrize("prompt", [[259, 78, 78, 81], [[259, 78, 78, 81]]])
def test_prompts_may_be_token_ids(plain, prompt):
    assert create(plain, prompt).choices[0].text == generate([259, 78, 78, 81]).outputs[0].text


@pytest.mark.parametrize("prompts", [["hello", "abc"], [[259, 78], [70, 71, 72]]])
def test_choices_of_several_prompts_are_numbered_through(plain, prompts):
    answer = create(plain, prompts, n=2, temperature=1.0, seed=5, max_tokens=6)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    params = SamplingParams(n=2, temperature=1.0, seed=5, max_tokens=6)
    outputs = offline().generate(prompts, params, use_tqdm=False)
    assert [choice.text for choice in answer.choices] == [c.text for output in outputs for c in output.outputs]
    assert answer.usage.completion_tokens == sum(len(c.token_ids) for output in outputs for c in output.outputs)


def test_streamed_choices_of_several_prompts_come_together(either):
    whole = create(either, ["hello", "abc"], n=2, temperature=1.0, seed=5, max_tokens=12)
    texts, ends = ["", "", "", ""], []
    for chunk in create(either, ["hello", "abc"], n=2, temperature=1.0, seed=5, max_tokens=12, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        if choice.finish_reason:
            ends.append(choice.index)
    assert texts == [choice.text for choice in whole.choices]
    assert sorted(ends) == [0, 1, 2, 3]


# --- logprobs and echo ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_top", [0, 1, 3])
def test_logprobs_are_the_targets_own(either, num_top):
    expected = generate(PROMPT, logprobs=num_top, max_tokens=8).outputs[0]
    found = create(either, logprobs=num_top, max_tokens=8).choices[0].logprobs
    chosen = [row[token_id] for row, token_id in zip(expected.logprobs, expected.token_ids, strict=True)]
    assert found.token_logprobs == [entry.logprob for entry in chosen]
    assert found.tokens == [entry.decoded_token for entry in chosen]
    assert found.text_offset[0] == 0
    for row, tops in zip(expected.logprobs, found.top_logprobs, strict=True):
        assert max(tops.values()) == max(entry.logprob for entry in row.values())
        assert set(tops) == {entry.decoded_token for entry in row.values()}


def test_streamed_logprobs_join_to_the_whole_ones(either):
    whole = create(either, logprobs=2, max_tokens=10).choices[0].logprobs
    parts = [chunk.choices[0].logprobs for chunk in create(either, logprobs=2, max_tokens=10, stream=True)]
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert [entry for part in parts for entry in getattr(part, name)] == getattr(whole, name)


def test_echo_puts_the_prompt_first(either):
    expected = generate(PROMPT, max_tokens=4).outputs[0].text
    assert create(either, echo=True, max_tokens=4).choices[0].text == PROMPT + expected
    chunks = create(either, echo=True, max_tokens=4, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT + expected


def test_a_streamed_echo_joins_to_the_whole_one(either):
    fields = {"prompt": [PROMPT, "hello"], "echo": True, "logprobs": 2, "max_tokens": 6, "n": 2, "seed": 3}
    whole = create(either, **fields)
    chunks = [chunk.choices[0] for chunk in create(either, **fields, stream=True)]
    for choice in whole.choices:
        parts = [chunk for chunk in chunks if chunk.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [entry for part in parts for entry in getattr(part.logprobs, name)]
            assert joined == getattr(choice.logprobs, name)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["na\u00efve \U0001f999 \u65e5\u672c end", "a<|im_start|>b"])
def test_offsets_are_places_in_the_text(either, prompt, stream):
    written = offline().get_tokenizer().encode("\u672c \U0001f999 x")
    bias = {str(token_id): 100 for token_id in written}
    fields = {"echo": True, "logprobs": 0, "max_tokens": 24, "temperature": 1.0, "seed": 3, "logit_bias": bias}
    answer = create(either, prompt, stream=stream, **fields)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    text = "".join(choice.text for choice in choices)
    tokens, offsets = (
        [entry for choice in choices for entry in getattr(choice.logprobs, name)] for name in ("tokens", "text_offset")
    )
    assert any("\ufffd" in token for token in tokens[-24:])
    whole = [(token, at) for token, at in zip(tokens, offsets, strict=True) if "\ufffd" not in token]
    assert len(whole) > 3
    assert [(token, at) for token, at in whole if not text.startswith(token, at)] == []
    assert offsets == sorted(offsets)


def test_special_tokens_that_encoding_adds_have_no_place_in_the_text(tmp_path):
    tokenizer = load_tokenizer(save_tiny_tokenizer(tmp_path))
    begin, *ids = tokenizer.encode("<|im_start|>ab<|im_start|>c")
    assert prompt_offsets(tokenizer, [begin, *ids], "<|im_start|>ab<|im_start|>c") == [0, 12, 13, 14, 26]
    assert prompt_offsets(tokenizer, [begin, *tokenizer.encode("abc")], "abc") == [0, 0, 1, 2]


def test_others_are_served_between_the_choices_of_an_answer(plain, monkeypatch):
    made, others, write = [], [], CompletionBuilder.choice

    def choice(*arguments):
        made.append(len(others))
        asyncio.get_running_loop().call_soon(others.append, "served")
        return write(*arguments)

    monkeypatch.setattr(CompletionBuilder, "choice", choice)
    plain.post("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 1})
    assert made == [0, 1, 2, 3]


@pytest.mark.parametrize("stream", [False, True])
def test_others_are_served_while_log_probabilities_are_written(plain, monkeypatch, stream):
    answered, write = [], completions.completion_logprobs

    def ask_and_write(*arguments, **more):
        answered.append(plain.send("GET", "/health")[0])
        return write(*arguments, **more)

    monkeypatch.setattr(completions, "completion_logprobs", ask_and_write)
    body = {"prompt": ["a", "b"], "echo": True, "logprobs": 1, "max_tokens": 1, "stream": stream}
    assert plain.send("POST", "/v1/completions", body)[0] == 200
    assert answered == [200, 200]


def test_log_probabilities_are_written_part_by_part(plain, monkeypatch):
    written, write = [], json_parts.to_json
    body = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 4, "temperature": 0}
    expected = [plain.post("/v1/completions", body)["choices"], plain.stream("/v1/completions", body)[0]["choices"]]
    monkeypatch.setattr(json_parts, "ENTRIES_AT_ONCE", 3)
    monkeypatch.setattr(json_parts, "to_json", lambda value: written.append(value) or write(value))
    assert plain.post("/v1/completions", body)["choices"] == expected[0]
    assert plain.stream("/v1/completions", body)[0]["choices"] == expected[1]
    assert max(len(part) for part in written if isinstance(part, list)) == 3
    assert not any(isinstance(part, dict) for part in written)


def test_an_evaluation_can_score_a_continuation(either):
    """What lm-eval's local-completions sends, and how it reads the answer."""
    tokenizer = offline().get_tokenizer()
    context, continuation = tokenizer.encode("hello "), tokenizer.encode("hello")
    greedy = generate("hello ", max_tokens=3, ignore_eos=True).outputs[0].token_ids
    prompts = [context + continuation, context + greedy]
    answer = create(either, prompts, echo=True, logprobs=1, max_tokens=1, seed=1234)
    assert [choice.index for choice in answer.choices] == [0, 1]
    judged = []
    for choice, prompt in zip(answer.choices, prompts, strict=True):
        logprobs = choice.logprobs
        assert len(logprobs.token_logprobs) == len(prompt) + 1
        assert logprobs.token_logprobs[0] is None
        assert logprobs.top_logprobs[0] is None
        scores = logprobs.token_logprobs[len(context) : -1]
        tops = logprobs.top_logprobs[len(context) : -1]
        judged.append(all(score == max(top.values()) for score, top in zip(scores, tops, strict=True)))
        (output,) = offline().generate(
            [prompt], SamplingParams(prompt_logprobs=1, max_tokens=1, temperature=0), use_tqdm=False
        )
        assert scores == [
            row[token].logprob
            for row, token in zip(output.prompt_logprobs[len(context) :], prompt[len(context) :], strict=True)
        ]
    assert judged == [False, True]


def test_echo_with_no_tokens_scores_the_prompt_alone(plain):
    answer = create(plain, echo=True, logprobs=0, max_tokens=0)
    assert answer.choices[0].text == PROMPT
    assert len(answer.choices[0].logprobs.tokens) == 9
    assert answer.usage.completion_tokens == 0


def test_echo_with_no_tokens_ends_by_its_length_whatever_would_follow(plain):
    (choice,) = create(plain, echo=True, max_tokens=0, logit_bias={EOS: 100}).choices
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (PROMPT, "length", None)


def test_token_ids_are_given_where_asked_for(either):
    expected = generate(PROMPT)
    choice = create(either, extra_body={"return_token_ids": True}).choices[0]
    assert choice.token_ids == expected.outputs[0].token_ids
    assert choice.prompt_token_ids == expected.prompt_token_ids
    chunks = list(create(either, stream=True, extra_body={"return_token_ids": True}))
    assert chunks[0].choices[0].prompt_token_ids == expected.prompt_token_ids
    assert all("prompt_token_ids" not in chunk.choices[0].model_extra for chunk in chunks[1:])
    assert [t for chunk in chunks for t in chunk.choices[0].token_ids] == expected.outputs[0].token_ids


def test_a_salt_keeps_prefixes_apart(plain):
    def cached(salt):
        body = {"prompt": "a long prompt of some blocks", "cache_salt": salt, "max_tokens": 1}
        return plain.post("/v1/completions", body)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("one") == 0
    assert cached("one") > 0
    assert cached("two") == 0


@pytest.mark.parametrize("best_of", [1, None])
def test_best_of_one_is_reserved(plain, best_of):
    assert create(plain, best_of=best_of).choices[0].text


SCHEMA = {"type": "object", "properties": {"width": {"type": "integer"}}, "required": ["width"]}
TAG = {"type": "tag", "begin": "<", "content": {"type": "regex", "pattern": "[ab]"}, "end": ">"}


@pytest.mark.parametrize(
    ("fields", "is_right"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, lambda text: text in ("yes", "no")),
        (
            {"response_format": {"type": "text"}, "structured_outputs": {"choice": ["yes", "no"]}},
            lambda text: text in ("yes", "no"),
        ),
        ({"structured_outputs": {"json": {}}}, lambda text: text.lstrip()[0] in '{["-0123456789tfn'),
        ({"structured_outputs": {"regex": "a{3}b?"}}, lambda text: text in ("aaa", "aaab")),
        ({"response_format": {"type": "regex", "regex": "[0-9]{4}"}}, lambda text: len(text) == 4 and text.isdigit()),
        ({"response_format": {"type": "choice", "choice": ["red"]}}, lambda text: text == "red"),
        ({"response_format": {"type": "structural_tag", "format": TAG}}, lambda text: text in ("<a>", "<b>")),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_matches_what_is_asked(either, fields, is_right, stream):
    answer = create(either, max_tokens=30, stream=stream, extra_body=fields)
    text = "".join(chunk.choices[0].text for chunk in answer) if stream else answer.choices[0].text
    assert is_right(text)


def test_a_schema_that_cannot_be_obeyed_in_full_is_refused_only_if_it_is_strict(plain):
    odd = {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 9},
        "uniqueItems": True,
        "maxItems": 2,
    }
    for strict, status in (({"strict": True}, 400), ({"strict": False}, 200), ({}, 200)):
        asked = {"type": "json_schema", "json_schema": {"name": "list", "schema": odd, **strict}}
        body = {"prompt": PROMPT, "max_tokens": 40, "response_format": asked}
        found, _, answer = plain.send("POST", "/v1/completions", body)
        assert found == status
        if status == 400:
            assert 'Unimplemented keys: ["uniqueItems"]' in answer["error"]["message"]
            assert answer["error"]["param"] == "response_format"
        else:
            assert answer["choices"][0]["text"].lstrip().startswith("[")


def test_an_answer_of_a_schema_is_what_the_offline_engine_writes(either):
    schema = {"type": "json_schema", "json_schema": {"name": "size", "schema": SCHEMA}}
    answer = create(either, max_tokens=40, extra_body={"response_format": schema})
    expected = generate(PROMPT, max_tokens=40, structured_outputs={"json": SCHEMA}).outputs[0]
    assert answer.choices[0].text == expected.text
    assert expected.text.lstrip().startswith("{")
