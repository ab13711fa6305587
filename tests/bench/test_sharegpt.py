"""ShareGPT files: which conversations are read, left out and refused."""

from __future__ import annotations

import json

import pytest

from forerun.bench.sharegpt import Exchange, read_conversations, sample_requests
from forerun.errors import ConfigError


def encode(text):
    return [ord(char) for char in text]


def conversation(*texts):
    return {"id": "x", "conversations": [{"from": "human", "value": text} for text in texts]}


def save(folder, content):
    path = folder / "file.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def sample(exchanges, **options):
    defaults = {"num_prompts": len(exchanges), "output_len": None, "max_tokens": 100, "seed": 0}
    return sample_requests(exchanges, encode, **{**defaults, **options})


def test_the_first_two_turns_are_prompt_and_answer(tmp_path):
    path = save(tmp_path, [conversation("question", "answer", "more")])
    assert read_conversations(path) == [Exchange("question", "answer")]


@pytest.mark.parametrize("texts", [(), ("question",)])
def test_conversations_of_less_than_two_turns_are_passed_over(tmp_path, texts):
    assert read_conversations(save(tmp_path, [conversation(*texts)])) == []


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        ("{", "cannot read"),
        ("\x00\xff", "cannot read"),
        ({}, "got a dict; must be a JSON list"),
        ([3], "entry 0 has no list under 'conversations'"),
        ([conversation("a", "b"), {}], "entry 1 has no list under 'conversations'"),
        ([{"conversations": {"value": "a"}}], "entry 0 has no list"),
        ([{"conversations": ["a"]}], "entry 0, turn 0 has no text under 'value'"),
        ([{"conversations": [{"value": "a"}, {"value": 3}]}], "entry 0, turn 1 has no text"),
    ],
)
def test_a_malformed_file_is_refused_with_the_place(tmp_path, content, hint):
    with pytest.raises(ConfigError) as caught:
        read_conversations(save(tmp_path, content))
    assert hint in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        read_conversations(tmp_path / "absent.json")


def test_the_answer_decides_how_many_tokens_are_written():
    (request,) = sample([Exchange("question", "an answer")])
    assert request == (encode("question"), 9)


def test_output_len_overrides_the_answer():
    (request,) = sample([Exchange("question", "a")], output_len=5)
    assert request.output_len == 5


@pytest.mark.parametrize(
    "exchange", [Exchange("abc", "answer"), Exchange("question", "abc"), Exchange("q" * 60, "a" * 41)]
)
def test_too_short_and_too_long_ones_are_passed_over(exchange):
    kept = Exchange("question", "an answer")
    assert sample([exchange, kept], num_prompts=1) == sample([kept])


def test_the_seed_decides_the_draw():
    exchanges = [Exchange(f"question {number}", "answer") for number in range(50)]
    draws = [sample(exchanges, num_prompts=5, seed=seed) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_asking_for_more_than_the_file_has_is_refused_with_the_numbers():
    with pytest.raises(ConfigError, match="num_prompts: got 3; the file has 1 conversations"):
        sample([Exchange("question", "answer")], num_prompts=3)
