"""Stages: an interrupted profile goes on, and a folder of something else is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.bench.profiling.stages import open_stages
from forerun.bench.profiling.step_sweep import RoundResult
from forerun.errors import ConfigError


def test_an_interrupted_profile_finds_its_stages(tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    open_stages(folder, {"model": "a", "grid": (1, 2)}).keep("round-0", {"steps": [1]})
    (folder / "stages" / "round-1.123.part.json").write_text('{"steps"')  # a process was killed while it wrote
    again = open_stages(folder, {"model": "a", "grid": (1, 2)})
    assert again.names() == ["round-0"]
    assert again.get("round-0") == {"steps": [1]}
    assert again.get("round-1") is None


def test_stages_of_another_measurement_are_not_used_until_overwritten(tmp_path: Path) -> None:
    open_stages(tmp_path, {"model": "a"}).keep("round-0", {})
    with pytest.raises(ConfigError, match=r"another model.*'a', here 'b'"):
        open_stages(tmp_path, {"model": "b"})
    assert open_stages(tmp_path, {"model": "b"}, overwrite=True).names() == []


def test_a_finished_profile_and_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match="has other files"):
        open_stages(tmp_path, {})
    with pytest.raises(ConfigError, match="Not a directory"):
        open_stages(tmp_path / "thesis.tex", {})
    finished = tmp_path / "finished"
    open_stages(finished, {})
    (finished / "profile.json").write_text("{}")
    with pytest.raises(ConfigError, match="has a profile already"):
        open_stages(finished, {})


def test_a_damaged_stage_says_what_to_delete(tmp_path: Path) -> None:
    stages = open_stages(tmp_path, {})
    stages.path("round-0").write_text("{")
    with pytest.raises(ConfigError, match=r"round-0\.json is damaged.*delete it"):
        stages.get("round-0")
    stages.path("round-0").write_text("{}")
    with pytest.raises(ConfigError, match=r"round-0\.json is damaged \(lacks 'steps'\).*delete it"):
        stages.load("round-0", RoundResult.from_json)
    (stages.path("identity")).write_text("[]")
    with pytest.raises(ConfigError, match=r"identity\.json is damaged"):
        open_stages(tmp_path, {})
    (stages.path("identity")).write_text("{")
    with pytest.raises(ConfigError, match=r"identity\.json is damaged"):
        open_stages(tmp_path, {})
