"""Variables are read with their meanings; script, code and documentation agree on names and defaults."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from benchmarks.experiment.settings import Settings, read_settings, unknown_variables, variable
from forerun.errors import ConfigError

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "run_benchmark.sh"
DEFAULTS = {variable(one): one.metadata["default"] for one in fields(Settings)}


def what_the_script_hands_over(tmp_path, **caller):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@" >&2\nenv\n')
    python.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(python), **caller}
    done = subprocess.run([SCRIPT, "--strict"], env=environment, capture_output=True, text=True, check=True)
    return done.stderr.strip(), dict(line.split("=", 1) for line in done.stdout.splitlines())


def test_the_script_hands_every_default_over(tmp_path):
    command, handed = what_the_script_hands_over(tmp_path)
    assert command == "-m benchmarks.experiment --strict"
    assert {name: handed[name] for name in DEFAULTS} == DEFAULTS | {"VLLM_NUM_SPECULATIVE_TOKENS": "5"}


def test_what_the_caller_has_set_wins(tmp_path):
    _, handed = what_the_script_hands_over(tmp_path, GAMMA_VALUE="7", NUM_PROMPTS="3", INFERENCE_ENGINE="vllm")
    assert [handed[name] for name in ("GAMMA_VALUE", "NUM_PROMPTS", "INFERENCE_ENGINE")] == ["7", "3", "vllm"]
    assert handed["VLLM_NUM_SPECULATIVE_TOKENS"] == "7"


def test_the_documentation_lists_every_variable_with_its_default():
    page = (ROOT / "docs" / "experiment.md").read_text()
    rows = dict(re.findall(r"^\| `([A-Z0-9_]+)` \| ([^|]*?) ?\|", page, re.M))
    assert rows == DEFAULTS | {"VLLM_NUM_SPECULATIVE_TOKENS": "$GAMMA_VALUE"}


def test_empty_counts_as_not_set():
    assert read_settings({"GAMMA_VALUE": "", "DRAFTER_MODEL": " "}) == read_settings({})


@pytest.mark.parametrize(
    ("given", "expected"), [({}, 5), ({"GAMMA_VALUE": "3"}, 3), ({"VLLM_NUM_SPECULATIVE_TOKENS": "8"}, 8)]
)
def test_vllm_drafts_as_many_tokens_as_gamma_by_default(given, expected):
    assert read_settings(given).num_vllm_speculative_tokens == expected


def test_without_batches_prompts_are_given_one_by_one():
    assert read_settings({"BATCH_SIZE": "6"}).prompts_per_batch == 6
    assert read_settings({"BATCH_SIZE": "6", "ENABLE_BATCH": "False"}).prompts_per_batch == 1


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("INFERENCE_ENGINE", "vlm", "may be forerun, transformers, vllm"),
        ("INFERENCE_METHOD", "fast", "may be speculative, target_ar"),
        ("NUM_PROMPTS", "-1", "a whole number of 0 or more"),
        ("GAMMA_VALUE", "0", "a whole number of 1 or more"),
        ("AUTO_RATE", "nan", "a number above 0"),
        ("AUTO_DURATION", "0", "a number above 0"),
        ("VLLM_GPU_MEMORY_UTILIZATION", "1.2", "at most 1"),
        ("ENABLE_BATCH", "yes", "true or false"),
        ("FORERUN_SPECULATIVE_CONFIG", "[1]", "a JSON object"),
        ("SHAREGPT_FILES", ",", "file names"),
        ("GPU_STRATEGY", "all", "multi_gpu_ratio"),
        ("PROMPT_MIN_LENGTH", "2000", "at most PROMPT_MAX_LENGTH"),
        ("GENERATION_LENGTH", "2048", "room for a prompt"),
    ],
)
def test_a_wrong_value_is_refused_with_what_may_be(name, value, message):
    with pytest.raises(ConfigError, match=f"^{name}: got .*{message}"):
        read_settings({name: value})


def test_unknown_variables_of_an_engine_are_warned_of_and_known_ones_are_not():
    environment = {"VLLM_NUM_SPECULATIVE_TOKEN": "4", "VLLM_DTYPE": "half", "FORERUN_CACHE": "/x", "OTHER": "1"}
    environment |= {"FORERUN_PACKED_CACHE_GB": "0"}
    (warning,) = unknown_variables(environment, ("vllm",))
    assert "did you mean VLLM_NUM_SPECULATIVE_TOKENS?" in warning
    assert "handed to vllm" in warning
    (warning,) = unknown_variables({"VLLM_CPU_KVCACHE_SPACE": "4"}, ("forerun",))
    assert "vllm is not measured" in warning
