"""`forerun demo`: two runs, one comparison."""

from __future__ import annotations

import json

import pytest

from forerun.cli.app import main
from forerun.cli.demo import DEFAULT_MODEL, DEFAULT_SPECULATION, WARM_UP_TOKENS
from tests.cli.fakes import FakeLoader


def test_identical_texts_exit_with_0(loader: FakeLoader, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    output = capsys.readouterr().out
    assert output.count("A fine answer.") == 2
    assert "speed-up" in output


def test_different_texts_exit_with_1(loader: FakeLoader, capsys: pytest.CaptureFixture[str]) -> None:
    loader.llm.plain_answer = "Another answer."
    assert main(["demo"]) == 1
    assert "NO" in capsys.readouterr().out


def test_default_is_the_known_model_with_drafts(loader: FakeLoader) -> None:
    main(["demo"])
    assert loader.models == [DEFAULT_MODEL]
    assert loader.options[0].speculative_config == DEFAULT_SPECULATION


def test_other_model_and_drafts_replace_the_default(loader: FakeLoader) -> None:
    main(["demo", "other", "--speculative-config.method", "suffix"])
    assert loader.models == ["other"]
    assert loader.options[0].speculative_config == {"method": "suffix"}


def test_plain_run_has_speculation_off_and_drafted_run_has_not(loader: FakeLoader) -> None:
    main(["demo"])
    assert [params.speculation for params in loader.llm.params] == ["off", None, "off", None]


def test_warm_up_is_short(loader: FakeLoader) -> None:
    main(["demo", "--max-tokens", "99"])
    assert [params.max_tokens for params in loader.llm.params] == [WARM_UP_TOKENS, WARM_UP_TOKENS, 99, 99]


def test_timed_runs_share_neither_cache_nor_past_answers(loader: FakeLoader) -> None:
    main(["demo"])
    assert [prompt["cache_salt"] for prompt in loader.llm.prompts] == ["warm-up", "warm-up", "plain", "speculated"]


def test_acceptance_counts_the_drafted_run_alone(loader: FakeLoader, capsys: pytest.CaptureFixture[str]) -> None:
    loader.llm.answer = "abcdefgh"
    main(["demo", "--json"])
    speculation = json.loads(capsys.readouterr().out)["speculation"]
    assert (speculation["num_steps"], speculation["acceptance_rate"]) == (2, 1.0)


def test_json_is_one_line_of_these_keys(loader: FakeLoader, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--json"]) == 0
    output = capsys.readouterr().out
    assert output.count("\n") == 1
    assert set(json.loads(output)) == {
        *("model", "speculative", "num_prompt_tokens", "plain", "speculated", "speculation", "speed_up", "identical"),
    }


def test_output_to_a_file_has_no_escape_codes(loader: FakeLoader, capsys: pytest.CaptureFixture[str]) -> None:
    main(["demo"])
    output = capsys.readouterr()
    assert "\x1b" not in output.out + output.err
