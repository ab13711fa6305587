"""A file of texts keeps every whole record, whatever cuts it off."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.errors import ConfigError
from forerun.train.texts import TextFile, WrittenText


def text(number, length=7):
    ids = np.arange(length, dtype=np.uint32) + number
    return WrittenText(number=number, temperature=0.5, token_ids=ids, spans=((2, 4), (5, length)) if length else ())


def read(path):
    with TextFile(path) as file:
        return [(one.number, one.temperature, one.token_ids.tolist(), one.spans) for one in file.texts]


def as_tuple(one):
    return one.number, one.temperature, one.token_ids.tolist(), one.spans


def test_what_was_added_is_read_again(tmp_path):
    written = [text(0), text(7, length=0), text(3, length=20)]
    with TextFile(tmp_path / "texts") as file:
        for one in written:
            file.append(one)
        assert file.num_written == 2 + 2 + 2 + 15
    assert read(tmp_path / "texts") == [as_tuple(one) for one in written]


@given(cut=st.integers(0, 500), seed=st.integers(0, 3))
def test_a_cut_at_any_byte_costs_only_the_records_behind_it(tmp_path_factory, cut, seed):
    path = tmp_path_factory.mktemp("texts") / "texts"
    written = [text(seed + number, length=6 + number) for number in range(4)]
    sizes = []
    with TextFile(path) as file:
        for one in written:
            file.append(one)
            sizes.append(path.stat().st_size)
    content = path.read_bytes()[:cut]
    path.write_bytes(content)
    kept = sum(size <= len(content) for size in sizes)
    assert read(path) == [as_tuple(one) for one in written[:kept]]
    with TextFile(path) as file:
        file.append(text(99))
    assert read(path) == [as_tuple(one) for one in [*written[:kept], text(99)]]


def test_a_damaged_record_and_all_behind_it_are_dropped(tmp_path):
    path = tmp_path / "texts"
    with TextFile(path) as file:
        file.append(text(0))
        end = path.stat().st_size
        file.append(text(1))
        file.append(text(2))
    content = bytearray(path.read_bytes())
    content[end + 30] ^= 1
    path.write_bytes(content)
    assert read(path) == [as_tuple(text(0))]


class FullDisk:
    """A stream that takes a part of what is written and then fails."""

    def __init__(self, path):
        self._stream = path.open("ab")

    def write(self, content):
        self._stream.write(content[: len(content) // 2])
        self._stream.flush()
        raise OSError(28, "No space left on device")

    def close(self):
        self._stream.close()


def test_a_full_disk_is_said_and_leaves_the_file_whole(tmp_path):
    path = tmp_path / "texts"
    with TextFile(path) as file:
        file.append(text(0))
        whole = path.read_bytes()
        file._stream.close()
        file._stream = FullDisk(path)
        with pytest.raises(ConfigError, match="No space left on device"):
            file.append(text(1))
    assert path.read_bytes() == whole


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot open"):
        TextFile(tmp_path / "missing" / "texts")
