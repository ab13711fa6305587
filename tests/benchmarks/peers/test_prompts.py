"""Prompts of each kind, all of a length that fits."""

from __future__ import annotations

import gzip
import json

import pytest

from benchmarks.peers.prompts import PromptError, read_prompts


class ByWord:
    """A tokenizer whose tokens are words, numbered by their length."""

    def apply_chat_template(self, messages):
        return [len(word) for word in messages[0]["content"].split(" ")]


def code_of(num_words, name="search"):
    return f"def {name}(x):\n" + " word" * num_words


@pytest.fixture
def sources(tmp_path):
    folder = tmp_path / "code"
    folder.mkdir()
    for i in range(3):
        (folder / f"{i}.py").write_text(code_of(350 + 200 * i))
    chat = tmp_path / "question.jsonl"
    chat.write_text("".join(json.dumps({"turns": [f"question {i}", "more"]}) + "\n" for i in range(3)))
    return folder, chat


def read(sources, count):
    return read_prompts(ByWord(), code=sources[0], chat=sources[1], count=count)


def test_there_are_as_many_of_each_kind_as_asked_for(sources):
    prompts = read(sources, 3)
    assert [len(found) for found in (prompts.code, prompts.chat, prompts.plain, prompts.prefill)] == [3] * 4


def test_plain_prompts_have_96_tokens_and_long_ones_512(sources):
    prompts = read(sources, 3)
    assert {len(prompt) for prompt in prompts.plain} == {96}
    assert {len(prompt) for prompt in prompts.prefill} == {512}


def test_the_same_prompts_come_each_time(sources):
    assert read(sources, 2) == read(sources, 2)


def test_files_too_short_too_long_or_without_a_function_are_passed_over(sources):
    folder, _ = sources
    (folder / "short.py").write_text(code_of(10))
    (folder / "long.py").write_text(code_of(2000))
    (folder / "data.py").write_text("x = 1" + " word" * 400)
    assert len(read(sources, 3).code) == 3
    with pytest.raises(PromptError, match="got 3 fitting prompts; 4 are needed"):
        read(sources, 4)


def test_archives_of_files_are_read_too(sources):
    folder, _ = sources
    with gzip.open(folder / "more.jsonl.gz", "wt") as lines:
        lines.write(json.dumps({"code": code_of(400, name="other")}) + "\n")
    with pytest.raises(PromptError, match="got 4 fitting prompts"):
        read((folder, sources[1]), 5)
