"""The requests of each workload."""

from __future__ import annotations

import json

import pytest

from benchmarks.auto_speculation.report import GOALS
from benchmarks.auto_speculation.workloads import PromptError, PromptFiles, WorkloadMaker
from forerun.errors import ConfigError


class ByWord:
    """A tokenizer whose tokens are words, numbered by their length."""

    has_chat_template = True

    def apply_chat_template(self, messages):
        return [len(word) for word in messages[0]["content"].split(" ")]


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "code"
    folder.mkdir()
    for i in range(6):
        (folder / f"{i}.py").write_text(f"def search_{i}(x):\n" + "    word\n" * 60)
    chat = tmp_path / "question.jsonl"
    chat.write_text("".join(json.dumps({"turns": ["ask" + " it" * i, "more"]}) + "\n" for i in range(30)))
    return PromptFiles(chat=chat, code=folder)


@pytest.fixture
def make(files):
    return WorkloadMaker(ByWord(), files, 50).make


def test_there_is_a_workload_for_every_goal(files, make):
    assert {*WorkloadMaker(ByWord(), files, 50).names} == {*GOALS}
    assert all(make(name).name == name for name in GOALS)


def test_each_prompt_is_a_group_of_its_own_where_one_sequence_runs(make):
    for name, count in (("chat-greedy", 30), ("chat-sampled", 30), ("code", 6), ("random", 40)):
        assert [len(group) for group in make(name).groups] == [1] * count


def test_sampled_chat_has_the_same_prompts_at_temperature_1_with_a_seed_each(make):
    greedy, sampled = (make(name).groups for name in ("chat-greedy", "chat-sampled"))
    assert [one.prompt for (one,) in greedy] == [one.prompt for (one,) in sampled]
    assert [one.sampling.temperature for (one,) in sampled] == [1.0] * 30
    assert len({one.sampling.seed for (one,) in sampled}) == 30


def test_batches_have_more_requests_than_run_and_mix_chat_with_code(make):
    batch = make("batch-8")
    assert batch.num_running == 8
    assert [len(group) for group in batch.groups] == [32]
    code = {tuple(one.prompt) for (one,) in make("code").groups}
    assert sum(tuple(one.prompt) in code for one in batch.groups[0]) == 6


def test_too_few_prompts_for_a_batch_make_one_group_of_all(make):
    assert [len(group) for group in make("batch-64").groups] == [36]


def test_the_first_prompts_of_one_sequence_are_taken_and_batches_whole(make):
    assert make("chat-greedy").first(2).groups == make("chat-greedy").groups[:2]
    assert make("chat-greedy").first(None) == make("chat-greedy")
    assert make("batch-8").first(0) == make("batch-8")


def test_other_prompts_have_another_digest(files):
    before = files.digest()
    assert files.digest() == before
    with files.chat.open("a") as lines:
        lines.write(json.dumps({"turns": ["one more"]}) + "\n")
    assert files.digest() != before


def test_the_longest_request_counts_its_answer(make):
    assert make("chat-greedy").longest == 30 + 256


def test_the_same_requests_come_each_time(make):
    assert all(make(name) == make(name) for name in GOALS)


def test_a_folder_without_code_is_named(tmp_path, files):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(PromptError, match="empty: got no Python file"):
        WorkloadMaker(ByWord(), PromptFiles(chat=files.chat, code=empty), 50).make("code")


def test_an_unknown_workload_is_refused(make):
    with pytest.raises(ConfigError, match="got 'speech'; may be chat-greedy"):
        make("speech")
