"""A run's folder is begun once, goes on wherever it was interrupted, and is refused where it is damaged or something else's."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import pytest

from forerun.errors import ConfigError
from forerun.train.run_folder import RunFolder

IDENTITY = {"seed": 0}


@contextmanager
def full_disk():
    """A disk on which no more than the first byte of a text fits."""
    write_text = Path.write_text

    def full(path, text, **options):
        write_text(path, text[:1], **options)
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        yield


def test_a_run_that_found_the_disk_full_at_its_beginning_goes_on(tmp_path):
    message = r"No space left on device.*; make room and give the same command again"
    with full_disk(), pytest.raises(ConfigError, match=message):
        RunFolder(tmp_path / "head", IDENTITY)
    assert RunFolder(tmp_path / "head", IDENTITY).progress.done == []


@pytest.mark.parametrize(
    "left", [[], ["training"], ["training/heads"], ["training/heads", "training/settings.json.unfinished"]]
)
def test_a_run_that_was_killed_before_its_settings_were_written_goes_on(tmp_path, left):
    for name in left:
        path = tmp_path / "head" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"see') if path.suffix else path.mkdir()
    RunFolder(tmp_path / "head", IDENTITY)
    with pytest.raises(ConfigError, match="is of a run with seed 0 instead of 1"):
        RunFolder(tmp_path / "head", {"seed": 1})


@pytest.mark.parametrize("mine", ["mine", "training/mine", "training/heads/mine"])
def test_a_folder_with_something_else_is_refused(tmp_path, mine):
    path = tmp_path / "head" / mine
    path.parent.mkdir(parents=True)
    path.write_text("x")
    with pytest.raises(ConfigError, match="is no folder of a training run"):
        RunFolder(tmp_path / "head", IDENTITY)
    assert [found for found in tmp_path.rglob("*") if found.is_file()] == [path]


@pytest.mark.parametrize("name", ["settings.json", "progress.json"])
@pytest.mark.parametrize("content", ["{", "[1]", "\u00e9".encode("latin-1")])
def test_a_damaged_file_is_named(tmp_path, name, content):
    RunFolder(tmp_path / "head", IDENTITY).save()
    path = tmp_path / "head" / "training" / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=f"{name}: cannot be read"):
        RunFolder(tmp_path / "head", IDENTITY)


def test_a_run_goes_on_in_one_process_at_a_time_from_where_the_last_one_came(tmp_path):
    first, second = (RunFolder(tmp_path / "head", IDENTITY) for _ in range(2))
    with first.held():
        with pytest.raises(ConfigError, match="another process goes on with the run"), second.held():
            pass
        first.finish("write")
    with second.held():
        assert second.is_done("write")


def test_progress_that_does_not_fit_on_the_disk_leaves_that_from_before(tmp_path):
    folder = RunFolder(tmp_path / "head", IDENTITY)
    folder.spend("write", 3.0)
    with full_disk(), pytest.raises(ConfigError, match="No space left on device"):
        folder.finish("write")
    again = RunFolder(tmp_path / "head", IDENTITY)
    assert (again.progress.seconds, again.progress.done) == ({"write": 3.0}, [])
