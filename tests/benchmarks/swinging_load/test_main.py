"""The runs of the benchmark and its prompts."""

from __future__ import annotations

import json

import pytest

from benchmarks.swinging_load.__main__ import _open_record, _turns, _write, read_prompts
from forerun.errors import ConfigError


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "code"
    folder.mkdir()
    for i in range(3):
        (folder / f"{i}.py").write_text(f"def search_{i}(x):\n" + "    word\n" * 60)
    chat = tmp_path / "question.jsonl"
    chat.write_text("".join(json.dumps({"turns": [f"question {i}"]}) + "\n" for i in range(5)))
    return chat, folder


def test_all_configurations_have_a_pace_one_after_the_other_and_back_in_the_next_round():
    turns = _turns(["plain", "auto"], [1.0, 2.0], rounds=2)
    assert [config for config, _, _ in turns] == ["plain", "auto"] * 2 + ["auto", "plain"] * 2
    assert [pace for _, pace, _ in turns] == [1.0, 1.0, 2.0, 2.0] * 2


def test_no_prompt_comes_twice(files):
    prompts = read_prompts(*files, count=8, seed=0)
    assert len({*prompts}) == 8
    assert sum("Rename the function" in prompt for prompt in prompts) == 3


def test_chat_and_code_come_in_turn(files):
    assert ["Rename" in prompt for prompt in read_prompts(*files, count=4, seed=0)] == [False, True, False, True]


def test_too_few_prompts_are_refused(files):
    with pytest.raises(ConfigError, match="got 8; 9 are needed"):
        read_prompts(*files, count=9, seed=0)


def test_runs_go_on_in_a_file_of_the_same_circumstances(tmp_path):
    path = tmp_path / "runs.json"
    record = _open_record(path, {"seed": 0}, {"auto": {"method": "auto"}})
    record["results"].append("a run")
    _write(path, record)
    found = _open_record(path, {"seed": 0}, {"auto": {"method": "auto"}, "more": None})
    assert (found["results"], [*found["configs"]]) == (["a run"], ["auto", "more"])


def test_runs_of_other_circumstances_or_configurations_are_not_added_to(tmp_path):
    path = tmp_path / "runs.json"
    _write(path, _open_record(path, {"seed": 0}, {"auto": {"method": "auto"}}))
    with pytest.raises(ConfigError, match="has seed 0, not 1; give another file"):
        _open_record(path, {"seed": 1}, {})
    with pytest.raises(ConfigError, match="has another configuration auto"):
        _open_record(path, {"seed": 0}, {"auto": None})
