"""A file is whole or not there, whatever happens while it is written."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

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


def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path):
    link, real = tmp_path / "link", tmp_path / "found.json"
    link.symlink_to(real)
    for text in ("first", "second"):
        with whole_file(link) as part:
            part.write_text(text)
        assert (link.is_symlink(), real.read_text()) == (True, text)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_written_to_and_stays_one(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as reader:
        read = reader.submit(pipe.read_text)
        with whole_file(pipe) as part:
            part.write_text("new")
        assert read.result() == "new"
    assert pipe.is_fifo()


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
