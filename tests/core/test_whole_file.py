"""A file is whole or not there, whatever happens while it is written."""

from __future__ import annotations

import os

import pytest

from forerun.core.whole_file import whole_file


def test_a_file_takes_its_name_when_it_is_whole(tmp_path):
    path = tmp_path / "found.json.gz"
    with whole_file(path) as part:
        part.write_text("new")
        assert part.suffix == ".gz"
        assert not path.exists()
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("fault", [KeyboardInterrupt, OSError])
def test_what_interrupts_the_writing_leaves_the_file_of_before_and_nothing_else(tmp_path, fault):
    path = tmp_path / "found.json"
    path.write_text("old")

    def write():
        with whole_file(path) as part:
            part.write_text("ne")
            raise fault

    with pytest.raises(fault):
        write()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == [path.name]
