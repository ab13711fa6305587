"""Files of prompts and of configurations: contents and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from forerun.cli.input_files import read_configs, read_kinds, read_prompts, read_yaml
from forerun.errors import ConfigError

ROOT = Path(__file__).parents[2]
NGRAM = {"method": "ngram", "num_speculative_tokens": 5}
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


@pytest.fixture
def read(tmp_path):
    def read(text):
        (tmp_path / "f.yaml").write_text(text)
        return read_configs(tmp_path / "f.yaml")

    return read


@pytest.mark.parametrize(
    "text",
    [
        "one: {method: ngram, num_speculative_tokens: 5}",
        '{"one": {"method": "ngram", "num_speculative_tokens": 5}}',
        "- {name: one, method: ngram, num_speculative_tokens: 5}",
        "- name: one\n  method: ngram\n  num_speculative_tokens: 5",
    ],
    ids=["yaml", "json", "list", "block"],
)
def test_configurations_are_named(read, text):
    assert read(text) == {"one": NGRAM}


def test_keys_with_hyphens_are_those_with_underscores(read):
    """All who read a profile or a plan of them later know no others."""
    assert read("one: {method: ngram, num-speculative-tokens: 5}") == {"one": NGRAM}


def test_one_without_a_name_is_called_what_it_is(read):
    found = read("- {method: ngram, num_speculative_tokens: 5}\n- {method: suffix}")
    assert list(found) == ["ngram, K=5", "suffix, K=24"]


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_the_benchmarks_own_files_can_be_read(path):
    assert read_configs(path)


def test_the_example_of_the_page_can_be_read(read):
    (example,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "commands" / "bench.md").read_text(), re.DOTALL)
    assert len(read(example)) == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no configuration"),
        ("[]", "holds no configuration"),
        ("ngram", "holds no configuration"),
        ("a: [", "neither YAML nor JSON"),
        ("a: 5", "a: got 5; must be a speculative_config"),
        ("- 5", "number 1: got 5; must be a speculative_config"),
        ("a: {method: ngram, lookup: 5}", "a: speculative_config: unknown key 'lookup'"),
        ("- {method: ngram, num_speculative_tokens: 500}", "number 1: num_speculative_tokens: got 500"),
        ("plain: {method: suffix}", "the name 'plain' is taken"),
        ("- {method: suffix}\n- {method: suffix}", "number 2: the name 'suffix, K=24' is taken"),
        ("a: {method: suffix}\na: {method: ngram}", "has the key 'a' twice"),
        ("- {method: suffix, method: ngram}", "has the key 'method' twice"),
        ("a: {method: ngram, num-speculative-tokens: 5, num_speculative_tokens: 4}", "a: a key is given twice"),
    ],
)
def test_mistakes_name_the_file_and_the_configuration(read, text, message):
    with pytest.raises(ConfigError, match=r"--configs: .*f\.yaml") as caught:
        read(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["a: &x\n  b: *x\n", "&x [1, *x]\n", pytest.param("[" * 5000, id="deep")])
def test_yaml_that_has_no_end_is_refused(text, tmp_path):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"--configs: .*a\.yaml is nested too deeply"):
        read_yaml(tmp_path / "a.yaml", option="--configs", example="port: 8001")
