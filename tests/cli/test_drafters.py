"""`forerun drafters`."""

from __future__ import annotations

import json

import pytest

from forerun.cli.app import main
from forerun.drafters.registry import DRAFTERS
from tests.stand_in import save_stand_in


def test_json_has_all_methods_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drafters", "--json"]) == 0
    output = capsys.readouterr().out
    assert output.count("\n") == 1
    assert json.loads(output).keys() == DRAFTERS.keys()


def test_the_list_names_each_method_in_a_narrow_terminal_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["drafters"]) == 0
    output = capsys.readouterr().out
    assert all(method in output for method in DRAFTERS)
    assert "arXiv 2411.04975" in output


@pytest.fixture
def model(tmp_path) -> str:
    return str(save_stand_in(tmp_path))


def test_for_a_model_it_says_what_auto_uses_and_why_not_the_rest(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["drafters", "--for", model, "--json"]) == 0
    output = capsys.readouterr().out
    assert output.count("\n") == 1
    report = json.loads(output)
    assert report.keys() == {"model", "default", "auto"}
    found = {choice["method"]: choice for choice in report["auto"]}
    assert found["copy"] == {"method": "copy", "is_used": True, "why": found["copy"]["why"], "num_bytes": 0}
    assert "name one with the key 'drafter'" in found["trained head"]["why"]
    assert main(["drafters", "--for", model]) == 0
    shown = capsys.readouterr().out
    assert "not used" in shown
    assert ("auto is the default here" in shown) == (report["default"] == "auto")


def test_auto_is_not_the_default_where_drafts_might_change_texts(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.build.load_kernels", lambda: None)
    assert main(["drafters", "--for", model]) == 0
    assert "turn it on with --speculative-config auto" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (("--speculative-config.method", "ngram"), "--speculative-config: given without a model"),
        (("--no-speculation",), "--no-speculation: given without a model"),
        (
            ("--dtype", "float32", "--seed", "3"),
            "--dtype, --seed: given without a model, to which it applies; name one",
        ),
    ],
)
def test_engine_options_without_a_model_are_refused(
    options: tuple[str, ...], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["drafters", *options]) == 2
    assert hint in capsys.readouterr().err


def test_what_auto_uses_is_not_asked_where_nothing_may_draft(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drafters", "--for", "m", "--no-speculation"]) == 2
    assert capsys.readouterr().err == "error: --no-speculation: --for asks what drafts; leave it out\n"
