"""A tuning's folder: files that are damaged are named, and what to do about them."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.bench.tuning.folder import TuningFolder
from forerun.errors import ConfigError
from forerun.plan.step_times import StepTimeModel
from tests.plan.profiles import WEIGHTS


def test_step_times_come_back(tmp_path: Path) -> None:
    folder = TuningFolder(tmp_path / "tuned", {"model": "a"})
    assert folder.step_times("int8") is None
    folder.keep_step_times("int8", StepTimeModel(WEIGHTS))
    assert folder.step_times("int8") == StepTimeModel(WEIGHTS)
    assert folder.step_times(None) is None


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("steps.json", "{"),
        ("steps.json", "{}"),
        ("steps.json", "[]"),
        ("screening.json", "{}"),
        ("screening.json", '{"probed": [], "screened": [{"candidate": {}}]}'),
        ("screening.json", '{"probed": 3, "screened": []}'),
        ("rounds.json", '[{"plain": {}}]'),
        ("rounds.json", "7"),
        ("seconds.json", "[]"),
        ("seconds.json", '{"record": "long"}'),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, file: str, text: str) -> None:
    folder = TuningFolder(tmp_path / "tuned", {"model": "a"})
    (tmp_path / "tuned" / file).write_text(text)
    readers = {
        "steps.json": lambda: folder.step_times(None),
        "screening.json": lambda: (folder.probed(), folder.screened()),
        "rounds.json": folder.rounds,
        "seconds.json": folder.seconds,
    }
    with pytest.raises(ConfigError, match=rf"{file}: .*delete it, and it is made anew"):
        readers[file]()


def test_a_folder_whose_settings_did_not_fit_on_the_disk_is_begun_again(tmp_path: Path, monkeypatch) -> None:
    write_text = Path.write_text

    def full(path: Path, text: str, **options: str) -> int:
        write_text(path, text[:1], **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        TuningFolder(tmp_path / "tuned", {"model": "a"})
    monkeypatch.undo()
    assert TuningFolder(tmp_path / "tuned", {"model": "a"}).rounds() == []


def test_damaged_settings_are_named(tmp_path: Path) -> None:
    TuningFolder(tmp_path / "tuned", {"model": "a"})
    (tmp_path / "tuned" / "settings.json").write_text("7")
    with pytest.raises(ConfigError, match=r"settings\.json: .*delete it"):
        TuningFolder(tmp_path / "tuned", {"model": "a"})
