"""Stages: an interrupted profile goes on, and a folder of something else is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.bench.profiling.stages import check_folder, held_stages, open_stages
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
    open_stages(tmp_path / "p", {"grid": {"rounds": 2, "contexts": [8, 24]}})
    with pytest.raises(ConfigError, match=r"another grid\.contexts \(\[8, 24\], here \[8\]\)"):
        open_stages(tmp_path / "p", {"grid": {"rounds": 2, "contexts": [8]}})
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


def test_what_an_interrupted_profile_took_is_the_sum_of_its_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("forerun.bench.profiling.stages.time.monotonic", lambda: now)
    first = open_stages(tmp_path, {}, started=90.0)
    now = 130.0
    first.keep("round-0", {})
    again = open_stages(tmp_path, {}, started=500.0)  # what was measured since the stage ended is lost
    now = 507.0
    assert again.seconds == 40.0 + 7.0
    assert again.names() == ["round-0"]
    assert open_stages(tmp_path, {}, overwrite=True, started=now).seconds == 0.0


def test_a_profile_that_is_overwritten_leaves_no_file_of_the_earlier_one(tmp_path: Path) -> None:
    open_stages(tmp_path, {}).keep("round-0", {})
    for name in ("decode_k5", "decode_k2", "selected_decode_interpolation", "selected_prefill_interpolation"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "raw_data.npz").touch()
    (tmp_path / "draft_traces").mkdir()
    written = ("profile.json", "speculation_profile.json", "sweep.csv", "profile.html", "mocker_k5.npz")
    for name in (*written, "recording.jsonl.gz", "draft_traces/0a.npz", "notes.txt"):
        (tmp_path / name).touch()
    open_stages(tmp_path, {}, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "stages"]
    assert [path.name for path in (tmp_path / "stages").iterdir()] == ["identity.json"]


def test_files_that_are_no_profile_stay_beside_one_whatever_their_names(tmp_path: Path) -> None:
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "scene-1.json").write_text("{}")
    (tmp_path / "sweep.csv").write_text("mine")
    open_stages(tmp_path, {}, overwrite=True)
    assert (tmp_path / "stages" / "scene-1.json").exists()
    assert (tmp_path / "sweep.csv").read_text() == "mine"


def test_an_unfinished_profile_is_left_alone_by_what_cannot_go_on_with_it(tmp_path: Path) -> None:
    open_stages(tmp_path, {}).keep("round-0", {})
    check_folder(tmp_path)
    with pytest.raises(ConfigError, match="has an unfinished profile, which would be lost"):
        check_folder(tmp_path, goes_on=False)
    check_folder(tmp_path, goes_on=False, overwrite=True)


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


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_profile_that_another_process_measures_is_left_alone(tmp_path: Path, *, overwrite: bool) -> None:
    refused = pytest.raises(ConfigError, match=r"another process measures into .*; wait for it, or give another folder")
    with held_stages(tmp_path / "p", {"model": "a"}) as stages:
        stages.keep("round-0", {})
        with refused, held_stages(tmp_path / "p", {"model": "a"}, overwrite=overwrite):
            pass
        assert stages.names() == ["round-0"]
    with held_stages(tmp_path / "p", {"model": "a"}, overwrite=overwrite) as stages:
        assert stages.names() == ([] if overwrite else ["round-0"])


def test_what_is_refused_anyway_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match="has other files"), held_stages(tmp_path, {}):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
