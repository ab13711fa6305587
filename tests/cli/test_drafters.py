"""`forerun drafters`."""

from __future__ import annotations

import json

import pytest

from forerun.cli.app import main
from forerun.drafters.registry import DRAFTERS


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
