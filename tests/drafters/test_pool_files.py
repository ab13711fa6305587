"""Files of pools: what is written is read again, and whatever is wrong with a file is found and named."""

from __future__ import annotations

import json
import os
import stat
import time
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from forerun.drafters.pool_files import (
    FORMAT,
    ModelIdentity,
    PoolFileError,
    SavedPools,
    check_model,
    read_pools,
    write_pools,
)

MODEL = ModelIdentity(fingerprint="f" * 64, name="tiny")
SECTION = {"tokens": np.arange(5, dtype=np.int32), "gaps": np.zeros((2, 3), np.uint8), "none": np.empty(0, np.int32)}
POOLS = SavedPools(model=MODEL, kinds={"answers": {None: SECTION, "a": SECTION}, "recycle": {"b/0": SECTION}})


def same(one, other):
    return {
        kind: [(salt, {name: array.tolist() for name, array in arrays.items()}) for salt, arrays in sections.items()]
        for kind, sections in one.items()
    } == {
        kind: [(salt, {name: array.tolist() for name, array in arrays.items()}) for salt, arrays in sections.items()]
        for kind, sections in other.items()
    }


def test_what_is_written_is_read_again(tmp_path):
    write_pools(tmp_path / "deep" / "x.pools", POOLS)
    read = read_pools(tmp_path / "deep" / "x.pools")
    assert read.model == MODEL
    assert same(read.kinds, POOLS.kinds)
    assert os.listdir(tmp_path / "deep") == ["x.pools"], "no part is left behind"


def test_only_the_owner_may_read_a_file(tmp_path):
    write_pools(tmp_path / "x.pools", POOLS)
    assert stat.S_IMODE((tmp_path / "x.pools").stat().st_mode) == 0o600


@settings(deadline=None, max_examples=30)
@given(salts=st.lists(st.one_of(st.none(), st.text()), unique=True, max_size=5))
def test_any_salt_is_kept_in_order_and_apart(salts, tmp_path_factory):
    path = tmp_path_factory.mktemp("pools") / "x.pools"
    sections = {salt: {"tokens": np.array([i], np.int32)} for i, salt in enumerate(salts)}
    write_pools(path, SavedPools(model=MODEL, kinds={"answers": sections}))
    assert same(read_pools(path).kinds, {"answers": sections})


def test_a_file_of_very_many_salts_is_read_in_a_moment(tmp_path):
    path, tokens = tmp_path / "x.pools", np.arange(3, dtype=np.int32)
    sections = {str(number): {"tokens": tokens} for number in range(10_000)}
    write_pools(path, SavedPools(model=MODEL, kinds={"answers": sections}))
    started = time.process_time()
    assert len(read_pools(path).kinds["answers"]) == 10_000
    assert time.process_time() - started < 2.0


def test_the_shared_part_holds_nothing_of_a_salt():
    assert same(POOLS.shared.kinds, {"answers": {None: SECTION}})


def test_a_file_that_cannot_be_replaced_stays_as_it_was(tmp_path, monkeypatch):
    write_pools(tmp_path / "x.pools", POOLS)
    before = (tmp_path / "x.pools").read_bytes()
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_pools(tmp_path / "x.pools", SavedPools(model=MODEL, kinds={}))
    assert (tmp_path / "x.pools").read_bytes() == before
    assert os.listdir(tmp_path) == ["x.pools"]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_damaged_or_truncated_file_is_named_and_never_read_as_another(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("pools") / "x.pools"
    write_pools(path, POOLS)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans(), label="truncate"):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    named = str(path)
    try:
        assert same(read_pools(path).kinds, POOLS.kinds), "only a blank behind the header may differ"
    except PoolFileError as error:
        named = str(error)
    assert str(path) in named


def test_a_file_of_another_version_is_named(tmp_path):
    path = tmp_path / "x.pools"
    write_pools(path, POOLS)
    save_file(load_file(path), path, {"format": "forerun-pools-9", "contents": "{}"})
    with pytest.raises(PoolFileError, match="forerun-pools-9"):
        read_pools(path)


@pytest.mark.parametrize("content", [b"", b"hello", b"\x80\x04\x95" * 100, b"\xff" * 64], ids=str)
def test_anything_else_is_no_file_of_pools(content, tmp_path):
    (tmp_path / "x.pools").write_bytes(content)
    with pytest.raises(PoolFileError, match="no file of pools") as caught:
        read_pools(tmp_path / "x.pools")
    assert "delete" not in str(caught.value), "it may be anything"


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(PoolFileError, match=r"x\.pools: there is no such file$"):
        read_pools(tmp_path / "x.pools")


@pytest.mark.parametrize(
    "contents", ["null", "[]", "{", "{}", json.dumps({"fingerprint": "a", "name": "b", "salts": 3})]
)
def test_a_header_of_the_wrong_shape_is_named(contents, tmp_path):
    checksum = f"{zlib.crc32(contents.encode()):08x}"
    save_file({}, tmp_path / "x.pools", {"format": FORMAT, "contents": contents, "checksum": checksum})
    with pytest.raises(PoolFileError, match=r"x\.pools.*delete it"):
        read_pools(tmp_path / "x.pools")


def test_a_file_of_another_model_is_refused(tmp_path):
    with pytest.raises(PoolFileError, match=r"another model, tiny .* weights or tokenizer differ"):
        check_model(tmp_path, MODEL, ModelIdentity(fingerprint="e" * 64, name="tiny"))
    check_model(tmp_path, MODEL, ModelIdentity(fingerprint=MODEL.fingerprint, name="renamed"))
