"""Prompt files: contents and refusals."""

from __future__ import annotations

import json

import pytest

from forerun.cli.input_files import read_kinds, read_prompts, read_yaml
from forerun.errors import ConfigError

USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}


def test_a_text_file_has_one_prompt_per_line(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo three\n")
    assert read_prompts(tmp_path / "a.txt") == ["one", "two three"]


@pytest.mark.parametrize(
    ("record", "prompt"),
    [
        ({"prompt": "one", "task_id": 7}, "one"),
        ({"question": "one", "answer": "two"}, "one"),
        ({"turns": ["one", "two"]}, "one"),
        ({"messages": [USER, ASSISTANT, USER]}, [USER, ASSISTANT, USER]),
        ({"messages": [USER, ASSISTANT]}, [USER]),
    ],
)
def test_json_lines_are_read_as_public_prompt_sets_have_them(record, prompt, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    assert read_prompts(tmp_path / "a.jsonl") == [prompt]


def test_a_line_ends_where_json_lines_do_and_a_byte_order_mark_is_none_of_it(tmp_path):
    prompts = ["one\u2028two", "three\x85four"]
    lines = "\r\n".join(json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts)
    (tmp_path / "a.jsonl").write_bytes(lines.encode("utf-8-sig"))
    assert read_prompts(tmp_path / "a.jsonl") == prompts


def test_each_file_is_a_kind_of_its_own(tmp_path):
    for name in ("chat", "code"):
        (tmp_path / f"{name}.txt").write_text(f"a {name} prompt\n")
    assert read_kinds([tmp_path / "chat.txt", tmp_path / "code.txt"]) == {
        "chat": ["a chat prompt"],
        "code": ["a code prompt"],
    }


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"prompt": "x"}\n{"text": "y"}\n', "prompt 2 must be an object with a text under"),
        ("a.jsonl", '{"prompt": 5}\n', "prompt 1 must be an object"),
        ("a.jsonl", '{"messages": [{"role": "user"}]}\n', "prompt 1 must be an object"),
        ("a.jsonl", '{"messages": []}\n', "prompt 1 must be an object"),
        ("a.jsonl", '{"turns": [["x"]]}\n', "prompt 1 must be an object"),
        ("a.jsonl", "[1]\n", "prompt 1 must be an object"),
        ("a.jsonl", "{\n", "prompt 1 is not JSON"),
        ("a.txt", "\n \n", "holds no prompt"),
        ("a.csv", "x\n", "must end in .jsonl, or in .txt"),
    ],
)
def test_any_other_file_is_refused(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_prompts(tmp_path / name)


def test_two_files_of_one_name_are_refused(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "chat.txt").write_text("a prompt\n")
    with pytest.raises(ConfigError, match="two files are called chat"):
        read_kinds([tmp_path / "x" / "chat.txt", tmp_path / "y" / "chat.txt"])


@pytest.mark.parametrize("text", ["a: &x\n  b: *x\n", "&x [1, *x]\n", pytest.param("[" * 5000, id="deep")])
def test_yaml_that_has_no_end_is_refused(text, tmp_path):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"--configs: .*a\.yaml is nested too deeply"):
        read_yaml(tmp_path / "a.yaml", option="--configs", example="port: 8001")
