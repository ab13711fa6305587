"""Pieces and merges that a start keeps give the next one the same tokenizer, without reading or finding them again."""

import logging
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.errors import ModelError
from forerun.models.config_file import read_config
from forerun.models.gguf.file import open_gguf
from forerun.models.gguf.merges import MergesById, ids_of
from forerun.models.gguf.metadata import Metadata
from forerun.models.gguf.pieces import Pieces, _keep, _mapped, ids_by_word
from forerun.models.gguf.tokenizer import build_tokenizer
from forerun.models.packed_cache import PackedCache
from tests.models.gguf.test_tokenizer import save
from tests.tiny_gguf import save_tiny_gguf

KINDS = {
    "byte-level": {},
    "SentencePiece": {"kind": "llama"},
    "Gemma": {"kind": "llama", "architecture": "gemma3"},
    "given merges": {"kind": "llama", "token_merges": ["▁ t", "h e", "▁t he"]},
}
WORDS = st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=1, max_size=20, unique=True)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    cache = PackedCache(folder=tmp_path / "packed", most_bytes=1 << 30, least_bytes=0)
    monkeypatch.setattr(PackedCache, "of_environment", lambda: cache)
    return cache


@pytest.fixture
def read(monkeypatch):
    """The arrays of strings that are read."""
    keys, strings = [], Metadata.strings
    monkeypatch.setattr(Metadata, "strings", lambda self, key: keys.append(key) or strings(self, key))
    return keys


def definition(path):
    tokenizer, special = build_tokenizer(open_gguf(path))
    return tokenizer.to_str(), special


def kept(cache):
    return [path for path in cache.folder.glob("*") if "-tokenizer-" in path.name]


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_start_builds_the_same_tokenizer_and_reads_no_strings(kind, tmp_path, cache, read):
    path = save(tmp_path / "m.gguf", **KINDS[kind])
    first = definition(path)
    assert "tokens" in read
    assert len(kept(cache)) == 1
    read.clear()
    assert definition(path) == first
    assert read == []


def test_a_file_that_was_written_again_is_read_again(tmp_path, read):
    path = save(tmp_path / "m.gguf", kind="llama")
    definition(path)
    save(path, kind="llama", tokenizer_pre="default", add_bos_token=False)
    read.clear()
    definition(path)
    assert "tokens" in read


def test_a_damaged_file_is_said_and_replaced(tmp_path, cache, read, caplog):
    path = save(tmp_path / "m.gguf", kind="llama")
    first = definition(path)
    (damaged,) = kept(cache)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert definition(path) == first
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    read.clear()
    assert definition(path) == first
    assert read == []


def test_where_nothing_can_be_kept_the_tokenizer_is_built_and_only_the_weights_warn(
    tmp_path, cache, monkeypatch, caplog
):
    (tmp_path / "file").write_text("")
    path = save(tmp_path / "m.gguf", kind="llama")
    expected = definition(path)
    full = PackedCache(folder=tmp_path / "file" / "packed", most_bytes=1 << 30, least_bytes=0)
    monkeypatch.setattr(PackedCache, "of_environment", lambda: full)
    with caplog.at_level(logging.INFO):
        assert definition(path) == expected
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_a_cache_of_no_bytes_keeps_no_tokenizer(tmp_path, cache, monkeypatch):
    off = PackedCache(folder=cache.folder, most_bytes=0, least_bytes=0)
    monkeypatch.setattr(PackedCache, "of_environment", lambda: off)
    definition(save(tmp_path / "m.gguf", kind="llama"))
    assert not cache.folder.exists()


def test_pieces_of_a_model_that_is_larger_than_the_cache_are_kept(tmp_path, cache):
    path = save(tmp_path / "m.gguf", kind="llama")
    with path.open("ab") as file:
        file.truncate(1 << 31)  # a hole, which takes no place on the disk
    definition(path)
    assert len(kept(cache)) == 1


def test_a_start_without_kernels_has_pieces_of_its_own(tmp_path, cache, monkeypatch):
    path = save(tmp_path / "m.gguf", kind="llama")
    definition(path)
    monkeypatch.setenv("FORERUN_CPU_KERNELS", "off")  # all pairs are merges then
    definition(path)
    assert any("-tokenizer-none-" in file.name for file in kept(cache))


def test_prune_removes_the_pieces_of_a_model_that_is_gone(tmp_path, cache):
    path = save(tmp_path / "m.gguf", kind="llama")
    definition(path)
    assert cache.prune() == []
    os.remove(path)
    assert [file.reason for file in cache.prune()] == [f"its model is gone: {path}"]
    assert kept(cache) == []


def test_a_merge_of_unknown_pieces_is_an_error_at_every_start_and_is_not_kept(tmp_path, cache):
    path = save(tmp_path / "m.gguf", kind="llama", token_merges=["▁ nowhere"])
    for _ in range(2):
        with pytest.raises(ModelError, match="its tokenizer cannot be built"):
            definition(path)
    assert kept(cache) == []


class Held:
    """Keeps tensors in memory."""

    def __init__(self):
        self.tensors = {}
        self.add, self.find_tensor = self.tensors.__setitem__, self.tensors.get


@given(words=WORDS, data=st.data())
def test_any_pieces_come_back_as_they_were_or_are_not_kept(words, data):
    merges = data.draw(st.lists(st.tuples(st.sampled_from(words), st.sampled_from(words))))
    ids, held = ids_by_word(words), Held()
    pairs = ids_of(merges, ids)
    _keep(Pieces(words, ids, pairs), held)
    found = _mapped(held)
    if any("\0" in word for word in words):
        assert found is None
    else:
        assert (found.words, found.ids, found.merges.tolist()) == (words, ids, pairs.tolist())
        assert list(MergesById(found.merges, found.words)) == merges


def test_of_equal_words_the_last_has_the_id():
    assert ids_by_word(["a", "b", "a"]) == {"a": 2, "b": 1}


def test_a_start_looks_through_the_vocabulary_for_ends_of_texts_once(tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    save_tiny_gguf(path)
    found, places = [], Metadata.places
    monkeypatch.setattr(Metadata, "places", lambda self, *of: found.append(of) or places(self, *of))
    configs = [read_config(path) for _ in range(3)]
    assert len(found) == 1
    assert configs[0].eos_token_id == configs[2].eos_token_id
