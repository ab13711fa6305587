"""`forerun collect-env`."""

from __future__ import annotations

import json
import platform

import pytest

from forerun.cli.app import main


def test_json_has_these_sections_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect-env", "--json"]) == 0
    output = capsys.readouterr().out
    assert output.count("\n") == 1
    assert list(json.loads(output)) == ["versions", "system", "cpu", "memory", "gpu", "models"]


def test_text_tells_the_versions(capsys: pytest.CaptureFixture[str]) -> None:
    main(["collect-env"])
    output = capsys.readouterr().out
    assert f"python: {platform.python_version()}" in output
    assert "torch: " in output


def test_environment_variables_and_host_name_stay_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_do_not_print")
    monkeypatch.setattr(platform, "node", lambda: "host-do-not-print")
    main(["collect-env"])
    assert "do_not_print" not in capsys.readouterr().out
    assert "do-not-print" not in capsys.readouterr().out
