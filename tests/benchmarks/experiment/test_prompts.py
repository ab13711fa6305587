"""Prompts are human turns of fitting length, in an order that the seed alone decides."""

from __future__ import annotations

import itertools
import json

import pytest

from benchmarks.experiment.prompts import draw_prompts, max_prompt_tokens, read_texts
from benchmarks.experiment.settings import read_settings
from forerun.errors import ConfigError

CONVERSATION = {"conversations": [{"from": "human", "value": "a" * 20}, {"from": "gpt", "value": "b" * 20}]}


def write(folder, name, *lines):
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def texts_of(folder, **variables):
    warnings = []
    settings = read_settings({"SHAREGPT_DIR": str(folder), **variables})
    return read_texts(settings, warnings.append), warnings


def test_the_prompts_that_forerun_ships_all_fit_by_default():
    assert len(read_texts(read_settings({}), pytest.fail)) == 12


def test_human_turns_of_fitting_length_are_read_and_absent_files_warned_of(tmp_path):
    long = {"conversations": [{"from": "human", "value": "c" * 30}, {"from": "human", "value": "d" * 5}]}
    write(tmp_path, "sharegpt_gpt4.jsonl", CONVERSATION, long, CONVERSATION)
    texts, warnings = texts_of(tmp_path, PROMPT_MAX_LENGTH="30", MAX_LOAD_LINES="2")
    assert texts == ["a" * 20, "c" * 30]
    assert len(warnings) == 2


def test_files_may_have_other_names(tmp_path):
    write(tmp_path, "mine.jsonl", CONVERSATION)
    assert texts_of(tmp_path, SHAREGPT_FILES="mine.jsonl") == (["a" * 20], [])


def test_a_folder_without_the_files_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"SHAREGPT_DIR: got .*has none of sharegpt_gpt4\.jsonl"):
        texts_of(tmp_path)


def test_a_line_that_is_no_conversation_is_named(tmp_path):
    write(tmp_path, "sharegpt_gpt4.jsonl", CONVERSATION, {"items": []})
    with pytest.raises(ConfigError, match=r"sharegpt_gpt4.jsonl: line 2 is no conversation"):
        texts_of(tmp_path)


def test_no_prompt_of_fitting_length_is_refused(tmp_path):
    write(tmp_path, "sharegpt_gpt4.jsonl", CONVERSATION)
    with pytest.raises(ConfigError, match="PROMPT_MAX_LENGTH: got 50 and 60; none of the 1 prompts"):
        texts_of(tmp_path, PROMPT_MIN_LENGTH="50", PROMPT_MAX_LENGTH="60")


def test_the_seed_decides_the_order_and_prompts_come_again():
    def draw(seed):
        texts = [str(number) for number in range(10)]
        prompts = draw_prompts(texts, lambda text: [int(text)], max_tokens=1, seed=seed)
        return list(itertools.islice(prompts, 20))

    assert draw(1) == draw(1) != draw(2)
    assert draw(1)[:10] == draw(1)[10:]
    assert sorted(draw(1)[:10]) == [[number] for number in range(10)]


def test_prompts_of_too_many_tokens_are_passed_over_unless_all_are():
    texts = ["a", "bbbb"]
    drawn = draw_prompts(texts, lambda text: [0] * len(text), max_tokens=3, seed=0)
    assert [next(drawn), next(drawn)] == [[0], [0]]
    with pytest.raises(ConfigError, match="every prompt has more than 0 tokens"):
        next(draw_prompts(texts, lambda text: [0] * len(text), max_tokens=0, seed=0))


def test_a_prompt_leaves_room_for_its_answer():
    assert max_prompt_tokens(read_settings({})) == 512
    assert max_prompt_tokens(read_settings({"ENABLE_BATCH": "false"})) == 1948
    assert max_prompt_tokens(read_settings({"MAX_MODEL_LEN": "300"})) == 200
    assert max_prompt_tokens(read_settings({"VLLM_MAX_MODEL_LEN": "200"})) == 100
