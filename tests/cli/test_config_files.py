"""Files of configurations: what is read of them and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forerun.cli.config_files import read_configs
from forerun.errors import ConfigError

ROOT = Path(__file__).parents[2]
NGRAM = {"method": "ngram", "num_speculative_tokens": 5}


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


def test_one_without_a_name_is_called_what_it_is(read):
    found = read("- {method: ngram, num_speculative_tokens: 5}\n- {method: suffix}")
    assert list(found) == ["ngram, K=5", "suffix, K=24"]


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_the_benchmarks_own_files_can_be_read(path):
    assert read_configs(path)


def test_the_example_of_the_page_can_be_read(read):
    (example,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "commands" / "bench.md").read_text(), re.DOTALL)
    assert len(read(example)) == 3


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
    ],
)
def test_mistakes_name_the_file_and_the_configuration(read, text, message):
    with pytest.raises(ConfigError, match=r"--configs: .*f\.yaml") as caught:
        read(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
