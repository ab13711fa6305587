"""Output that cannot be written is refused beforehand, and asking changes nothing."""

from __future__ import annotations

import os

import pytest

from forerun.core.writable import check_writable_file, check_writable_folder
from forerun.errors import ConfigError

PROC = pytest.param("/proc/x", marks=pytest.mark.skipif(not os.path.isdir("/proc"), reason="needs Linux"))


def test_what_can_be_written_is_left_as_it_is(tmp_path):
    (tmp_path / "there.json").write_text("kept")
    for name in ("there.json", "new.json"):
        check_writable_file("--output", tmp_path / name)
    for name in (".", "new", "new/deep"):
        check_writable_folder("--output", tmp_path / name)
    check_writable_file("--output", None)
    check_writable_folder("--output", None)
    assert os.listdir(tmp_path) == ["there.json"]
    assert (tmp_path / "there.json").read_text() == "kept"


@pytest.mark.parametrize("name", ["folder", "no/such/x.json", "file/x.json", PROC])
def test_a_file_that_cannot_be_written_is_refused(name, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^--output: cannot write .*\(.+\); give a file in a folder that exists"):
        check_writable_file("--output", tmp_path / name)


@pytest.mark.parametrize("name", ["file", "file/deep/er", PROC])
def test_a_folder_that_cannot_be_made_is_refused(name, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^--output: cannot write to .*\(.+\); give a folder"):
        check_writable_folder("--output", tmp_path / name)


def test_a_pipe_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # whoever reads it would take the end of the check for the end of the output
    check_writable_file("--output", tmp_path / "pipe")
