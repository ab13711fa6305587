"""The cache of packed weights: a second start reads no matrix and computes the same, and nothing wrong is ever used."""

from __future__ import annotations

import errno
import json
import logging
import math
import multiprocessing
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from forerun.errors import ConfigError
from forerun.models import packed_cache
from forerun.models.checkpoint import SafetensorsCheckpoint
from forerun.models.gguf.checkpoint import GGUFCheckpoint
from forerun.models.gguf.file import open_gguf
from forerun.models.kept_weights import MappedWeights, NewWeights, Unkept
from forerun.models.loader import load_model
from forerun.models.packed_cache import SUFFIX, PackedCache, PackedModel
from forerun.models.packed_file import PackedFileWriter
from forerun.models.packing import Packing
from tests.family_gguf import save_family
from tests.models.random_decoders import CPU
from tests.models.test_packed_file import plain
from tests.models.test_packing import logits_of
from tests.native import KERNELS, needs_kernels
from tests.tiny_gguf import save_tiny_gguf
from tests.tiny_models import save_tiny_model

IN_BLOCKS = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}  # as int4 needs


@pytest.fixture
def cache(tmp_path):
    return PackedCache(folder=tmp_path / "packed", most_bytes=1 << 30, least_bytes=0)


@pytest.fixture
def source(tmp_path):
    """A model's files; the cache looks at their names, sizes, times and samples only."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text("{}")
    return folder


def described(path, **changes):
    return PackedModel(**({"path": path, "format": "fp32", "level": "portable", "dtype": "torch.float32"} | changes))


def keep(cache, path, *, seed=0, **changes):
    """Keep one weight of a model."""
    with cache.weights(described(path, **changes)) as kept:
        kept.add("w", plain(seed=seed))


def is_kept(cache, path, **changes):
    with cache.weights(described(path, **changes)) as kept:
        if isinstance(kept, NewWeights):
            kept.abandon()
        return kept.is_complete


def names(cache):
    return sorted(path.name for path in cache.folder.glob("*"))


# --- loading --------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Gemma2ForCausalLM"])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_second_start_reads_no_matrix_and_computes_the_same_bits(
    architecture, quantization, tmp_path, cache, monkeypatch
):
    save_tiny_model(tmp_path / "model", architecture, vocab_size=97, **IN_BLOCKS)
    monkeypatch.setattr(PackedCache, "of_environment", lambda: cache)
    load, read = SafetensorsCheckpoint.load, []
    monkeypatch.setattr(SafetensorsCheckpoint, "load", lambda self, name: read.append(name) or load(self, name))
    kernels = next(iter(KERNELS.values()))

    def start():
        read.clear()
        packing = Packing.choose(kernels, dtype=torch.bfloat16, quantization=quantization)
        model = load_model(tmp_path / "model", dtype=packing.format.activations, device=CPU, packing=packing)
        return logits_of(model, kernels)

    first = start()
    assert any("q_proj" in name for name in read)
    second = start()
    assert [name for name in read if "norm" not in name] == []
    assert torch.equal(first, second)
    assert len(names(cache)) == 1


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "TQ2_0", "an embedding of its own"])
def test_a_second_start_of_a_gguf_file_reads_no_matrix_and_computes_the_same_bits(
    kind, dtype, tmp_path, cache, monkeypatch
):
    file = tmp_path / "tiny.gguf"
    if kind == "an embedding of its own":
        file = save_family(tmp_path / "model", "qwen2")
    else:
        save_tiny_gguf(file, kinds=[kind])
    monkeypatch.setattr(PackedCache, "of_environment", lambda: cache)
    load, read = GGUFCheckpoint.load, []
    monkeypatch.setattr(GGUFCheckpoint, "load", lambda self, name: read.append(name) or load(self, name))
    kernels = next(iter(KERNELS.values()))

    def start():
        read.clear()
        model = load_model(file, dtype=dtype, device=CPU, packing=Packing.choose(kernels, dtype=dtype))
        return logits_of(model, kernels)

    first = start()
    assert any("q_proj.weight" in name for name in read)
    second = start()
    assert [name for name in read if "norm" not in name] == []
    assert torch.equal(first, second)


@needs_kernels
@pytest.mark.parametrize(
    ("kinds", "dtype", "bytes_per_weight"),
    [
        ([], torch.float32, 4),
        (["Q8_0"], torch.float32, 4),
        (["Q8_0"], torch.bfloat16, 34 / 32),
        (["TQ2_0"], torch.bfloat16, 1.5),
    ],
)
def test_room_is_asked_for_what_weights_take_packed(kinds, dtype, bytes_per_weight, tmp_path, monkeypatch):
    expected = []
    monkeypatch.setattr(PackedCache, "_has_room", lambda self, num_bytes, log_level: expected.append(num_bytes))
    cache = PackedCache(folder=tmp_path / "packed", most_bytes=1 << 30, least_bytes=0)
    monkeypatch.setattr(PackedCache, "of_environment", lambda: cache)
    save_tiny_gguf(tmp_path / "tiny.gguf", kinds=kinds)
    packing = Packing.choose(next(iter(KERNELS.values())), dtype=dtype)
    load_model(tmp_path / "tiny.gguf", dtype=dtype, device=CPU, packing=packing)
    matrices = [place for place in open_gguf(tmp_path / "tiny.gguf").tensors.values() if len(place.shape) == 2]
    num_weights = sum(math.prod(place.shape) for place in matrices)
    assert expected[0] == pytest.approx(bytes_per_weight * num_weights, rel=0.05)


@needs_kernels
def test_a_start_that_fails_keeps_nothing(tmp_path, cache, monkeypatch):
    save_tiny_model(tmp_path / "model", "LlamaForCausalLM", vocab_size=97)
    monkeypatch.setattr(PackedCache, "of_environment", lambda: cache)
    load = SafetensorsCheckpoint.load

    def fail(self, name):
        if "layers.1" in name:
            raise KeyboardInterrupt
        return load(self, name)

    monkeypatch.setattr(SafetensorsCheckpoint, "load", fail)
    packing = Packing.choose(next(iter(KERNELS.values())), dtype=torch.bfloat16)
    with pytest.raises(KeyboardInterrupt):
        load_model(tmp_path / "model", dtype=torch.bfloat16, device=CPU, packing=packing)
    assert names(cache) == []


# --- what is found --------------------------------------------------------------------------------


def test_kept_weights_are_found_again(cache, source):
    keep(cache, source)
    with cache.weights(described(source)) as kept:
        assert isinstance(kept, MappedWeights)
        assert torch.equal(kept.find("w").data, plain().data)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "model.safetensors").write_bytes(b"WEIGHTS"),
        lambda folder: os.utime(folder / "model.safetensors", (1, 1)),
        lambda folder: (folder / "config.json").write_text('{"a": 1}'),
        lambda folder: (folder / "more.safetensors").write_bytes(b"more"),
    ],
)
def test_a_model_that_has_changed_is_packed_again(change, cache, source):
    keep(cache, source)
    change(source)
    assert not is_kept(cache, source)


@pytest.mark.parametrize("change", [{"format": "int8"}, {"level": "avx2"}, {"dtype": "torch.bfloat16"}])
def test_another_format_level_or_dtype_is_packed_for_itself(change, cache, source):
    keep(cache, source)
    assert not is_kept(cache, source, **change)
    assert is_kept(cache, source)


@pytest.mark.parametrize("change", [lambda file: file.write_bytes(b"WEIGHTS"), lambda file: file.unlink()])
def test_what_was_read_while_a_model_changed_is_not_kept(change, cache, source, caplog):
    with cache.weights(described(source)) as kept:
        kept.add("w", plain())
        change(source / "model.safetensors")
    assert names(cache) == []
    assert "changed while they were read" in caplog.text


def test_another_version_of_the_code_packs_again(cache, source, monkeypatch):
    keep(cache, source)
    monkeypatch.setattr(packed_cache, "_code", lambda level: "another")
    assert not is_kept(cache, source)


@pytest.mark.parametrize("way", ["../model", "../model/../model", "../link", "."])
def test_a_model_is_found_whichever_way_leads_to_it(way, cache, source, tmp_path, monkeypatch):
    keep(cache, source)
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(source if way == "." else tmp_path / "elsewhere")
    assert is_kept(cache, Path(way))
    assert cache.prune() == []


def test_a_file_is_found_whichever_way_leads_to_it(cache, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "model.gguf").write_bytes(b"weights")
    keep(cache, tmp_path / "model.gguf")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert is_kept(cache, Path("../model.gguf"))
    assert cache.prune() == []


def test_a_link_to_a_file_goes_by_its_own_name(cache, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"weights")
    (tmp_path / "link.gguf").symlink_to("model.gguf")
    keep(cache, tmp_path / "link.gguf")
    assert cache.prune() == []


def test_all_parts_of_a_split_file_count_and_any_names_it(cache, tmp_path):
    parts = [tmp_path / f"m[1]-0000{i}-of-00002.gguf" for i in (1, 2)]
    for part in parts:
        part.write_bytes(b"x")
    keep(cache, parts[0])
    assert is_kept(cache, parts[0])
    assert is_kept(cache, parts[1])
    assert cache.prune() == []
    parts[1].write_bytes(b"y")
    assert not is_kept(cache, parts[0])


def test_a_link_that_leads_nowhere_is_none_of_the_weights(cache, source):
    (source / "pytorch_model.bin").symlink_to(source / "absent")
    keep(cache, source)
    assert is_kept(cache, source)


def test_a_long_name_in_any_script_is_kept(cache, source):
    folder = source.rename(source.with_name("\N{CJK UNIFIED IDEOGRAPH-6A21}" * 80))
    keep(cache, folder)
    assert is_kept(cache, folder)


def test_a_damaged_file_is_said_and_replaced(cache, source, caplog):
    keep(cache, source)
    (path,) = cache.folder.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    keep(cache, source)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert is_kept(cache, source)


def test_small_models_are_not_kept(source, tmp_path):
    cache = PackedCache(folder=tmp_path / "packed", most_bytes=1 << 30)
    keep(cache, source)
    assert not cache.folder.exists()


def test_a_cache_of_no_bytes_is_neither_written_nor_used(cache, source):
    keep(cache, source)
    off = PackedCache(folder=cache.folder, most_bytes=0, least_bytes=0)
    with off.weights(described(source)) as kept:
        assert isinstance(kept, Unkept)


@pytest.mark.parametrize(("given", "most_bytes"), [("", 32e9), ("0", 0), ("0.5", 5e8), ("100", 1e11)])
def test_the_environment_says_how_much_is_kept(given, most_bytes, monkeypatch):
    monkeypatch.setenv("FORERUN_PACKED_CACHE_GB", given)
    assert PackedCache.of_environment().most_bytes == most_bytes


@pytest.mark.parametrize("given", ["-1", "much", "nan", "inf"])
def test_a_size_that_is_none_is_refused(given, monkeypatch):
    monkeypatch.setenv("FORERUN_PACKED_CACHE_GB", given)
    with pytest.raises(ConfigError, match="FORERUN_PACKED_CACHE_GB: got"):
        PackedCache.of_environment()


# --- where it cannot be written -------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path, source, caplog):
    (tmp_path / "file").write_text("")
    cache = PackedCache(folder=tmp_path / "file" / "packed", most_bytes=1 << 30, least_bytes=0)
    with cache.weights(described(source)) as kept:
        kept.add("w", plain())
        kept.add("v", plain())
    assert len(caplog.records) == 1
    assert "packed weights are not kept" in caplog.text


def test_a_folder_that_may_not_be_looked_into_is_one_warning(tmp_path, source, caplog):
    """For root there is no such folder, but a name that is too long is refused alike."""
    folder = tmp_path / ("x" * 300) / "packed"
    with pytest.raises(OSError):
        folder.exists()
    cache = PackedCache(folder=folder, most_bytes=1 << 30, least_bytes=0)
    with cache.weights(described(source)) as kept:
        kept.add("w", plain())
    assert len(caplog.records) == 1
    assert "packed weights are not kept" in caplog.text


def test_a_disk_that_runs_full_is_one_warning_and_leaves_nothing(cache, source, caplog, monkeypatch):
    def fail(self, name, weight):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PackedFileWriter, "add", fail)
    with cache.weights(described(source)) as kept:
        kept.add("w", plain())
        kept.add("v", plain())
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    assert names(cache) == []


def test_weights_that_turn_out_larger_than_expected_do_not_fill_the_disk(cache, source, caplog, monkeypatch):
    usage, left = namedtuple("usage", "free"), iter([4e9, 2e9, 5e8])
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(free=next(left)))
    with cache.weights(described(source)) as kept:
        kept.add("w", plain())
        kept.add("v", plain())
    assert names(cache) == []
    assert len(caplog.records) == 1
    assert f"{cache.folder} has only 0.5 GB left" in caplog.text


def test_a_disk_that_is_nearly_full_is_not_filled(cache, source, caplog, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(free=10))
    keep(cache, source)
    assert not cache.folder.exists()
    assert len(caplog.records) == 1


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder in which nobody can make one")
@pytest.mark.parametrize("folder", ["/proc/forerun/packed", "/proc"])
def test_a_folder_that_cannot_be_made_or_written_is_no_full_disk(folder, source, caplog):
    keep(PackedCache(folder=Path(folder), most_bytes=1 << 30, least_bytes=0), source)
    (record,) = caplog.records
    assert f"{folder} cannot be made or written (/proc: " in record.getMessage()
    assert "set FORERUN_CACHE to a folder" in record.getMessage()
    assert "free" not in record.getMessage()


@pytest.mark.parametrize(
    ("most_gb", "said"),
    [
        (10, "take about 2.2 GB beside 1.07 that stay free, and "),
        (2, "take about 2.2 GB, the cache at most 2; raise FORERUN_PACKED_CACHE_GB"),
    ],
)
def test_weights_that_will_be_larger_than_their_files_are_not_begun_where_they_have_no_room(
    most_gb, said, source, tmp_path, caplog, monkeypatch
):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(free=3_000_000_000))
    cache = PackedCache(folder=tmp_path / "packed", most_bytes=most_gb * 10**9, least_bytes=0)
    with cache.weights(described(source), expected_bytes=2_200_000_000) as kept:
        assert isinstance(kept, Unkept)
    assert len(caplog.records) == 1
    assert said in caplog.text


def test_weights_that_are_more_than_the_cache_may_hold_are_one_warning(source, tmp_path, caplog):
    cache = PackedCache(folder=tmp_path / "packed", most_bytes=1000, least_bytes=0)
    with cache.weights(described(source)) as kept:
        kept.add("w", plain())
        kept.add("v", plain())
    assert names(cache) == []
    assert "raise FORERUN_PACKED_CACHE_GB" in caplog.text


def test_a_folder_that_may_only_be_read_is_used(cache, source, monkeypatch, caplog):
    def refuse(path, *times):
        raise PermissionError(path)

    keep(cache, source)
    monkeypatch.setattr(os, "utime", refuse)
    assert is_kept(cache, source)
    assert caplog.records == []


def test_of_two_that_pack_at_once_one_stands_and_both_go_on(cache, source, caplog):
    with cache.weights(described(source)) as first, cache.weights(described(source)) as second:
        first.add("w", plain())
        second.add("w", plain())
    assert is_kept(cache, source)
    assert len(names(cache)) == 1
    assert caplog.records == []


@needs_kernels
def test_two_processes_that_pack_at_once_compute_the_same_and_leave_one_file(tmp_path, cache, monkeypatch):
    save_tiny_model(tmp_path / "model", vocab_size=97)
    kernels, fork = next(iter(KERNELS.values())), multiprocessing.get_context("fork")
    packing = Packing.choose(kernels, dtype=torch.bfloat16)
    begin, both_have_begun = NewWeights.__init__, fork.Barrier(2)

    def meet(self, *arguments, **named):
        begin(self, *arguments, **named)
        both_have_begun.wait(timeout=60)

    def start(output):
        model = load_model(tmp_path / "model", dtype=torch.bfloat16, device=CPU, packing=packing)
        output.write_text(str(logits_of(model, kernels).tolist()))

    monkeypatch.setattr(NewWeights, "__init__", meet)
    monkeypatch.setattr(PackedCache, "of_environment", lambda: cache)
    outputs = [tmp_path / name for name in ("first", "second")]
    processes = [fork.Process(target=start, args=(output,)) for output in outputs]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    assert [process.exitcode for process in processes] == [0, 0]
    assert outputs[0].read_text() == outputs[1].read_text()
    assert len(names(cache)) == 1


def test_a_model_without_packed_weights_gets_no_file(cache, source):
    with cache.weights(described(source)):
        pass
    assert names(cache) == []


# --- room -----------------------------------------------------------------------------------------


def test_the_least_recently_used_go_when_room_is_needed(cache, tmp_path, source):
    models = [shutil.copytree(source, tmp_path / name) for name in ("a", "b", "c", "d")]
    for place, model in enumerate(models[:3]):
        keep(cache, model)
        (path,) = cache.folder.glob(f"{model.name}-*")
        os.utime(path, (place, place))
    assert is_kept(cache, models[0])  # which is a use
    size = next(cache.folder.iterdir()).stat().st_size
    keep(PackedCache(folder=cache.folder, most_bytes=3 * size + 100, least_bytes=0), models[3])
    assert [is_kept(cache, model) for model in models] == [True, False, True, True]


def test_room_is_made_though_another_process_removes_a_file_meanwhile(cache, tmp_path, source, monkeypatch):
    other = shutil.copytree(source, tmp_path / "other" / "model")
    keep(cache, other)
    (old,) = cache.folder.iterdir()
    read = packed_cache.read_table

    def read_if_there(path):
        if path == old:
            raise FileNotFoundError(path)
        return read(path)

    monkeypatch.setattr(packed_cache, "read_table", read_if_there)
    keep(PackedCache(folder=cache.folder, most_bytes=old.stat().st_size + 100, least_bytes=0), source)
    assert len(names(cache)) == 1


def test_what_was_packed_before_a_model_changed_goes_with_the_next_and_nothing_else(cache, tmp_path, source):
    other = shutil.copytree(source, tmp_path / "other" / "model")
    (other / "model.safetensors").write_bytes(b"others")
    keep(cache, other)
    keep(cache, source)
    keep(cache, source, dtype="torch.bfloat16")
    before = names(cache)
    for seed in range(3):
        (source / "model.safetensors").write_bytes(bytes([seed]) * (seed + 1))
        keep(cache, source, seed=seed)
        assert is_kept(cache, source)
    assert is_kept(cache, other)
    assert len(before) == 3
    assert len(names(cache)) == 2


def test_what_older_code_of_the_same_installation_packed_goes_with_the_next(cache, source, monkeypatch):
    keep(cache, source)
    with monkeypatch.context() as other:
        other.setattr(packed_cache, "PACKAGE", Path("another"))
        for code in ("older", "newer"):
            other.setattr(packed_cache, "_code", lambda level, code=code: code)
            keep(cache, source)
            assert is_kept(cache, source)
    assert is_kept(cache, source)
    assert len(names(cache)) == 2


def test_what_a_killed_process_left_goes_after_an_hour(cache, source):
    cache.folder.mkdir()
    old, new = (cache.folder / f".model-{name}{SUFFIX}.0" for name in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    keep(cache, source)
    assert (old.exists(), new.exists()) == (False, True)


def test_prune_removes_what_no_start_can_use(cache, tmp_path, source, monkeypatch):
    models = {name: shutil.copytree(source, tmp_path / name) for name in ("good", "gone", "changed", "damaged")}
    for model in models.values():
        keep(cache, model)
    shutil.rmtree(models["gone"])
    (models["changed"] / "model.safetensors").write_bytes(b"WEIGHTS")
    (damaged,) = cache.folder.glob("damaged-*")
    damaged.write_bytes(b"")
    removed = cache.prune()
    assert sorted(file.name.partition("-")[0] for file in removed) == ["changed", "damaged", "gone"]
    assert is_kept(cache, models["good"])
    monkeypatch.setattr(packed_cache, "_code", lambda level: "another")
    assert [file.reason for file in cache.prune()] == ["it is of another version of forerun"]
    assert cache.num_bytes == 0


def test_a_copy_of_a_model_that_is_gone_keeps_what_was_packed_of_it(cache, source, tmp_path):
    copy = shutil.copytree(source, tmp_path / "elsewhere" / "model")  # with names and times
    keep(cache, source)
    keep(cache, copy)
    shutil.rmtree(source)
    assert [file.reason for file in cache.prune()] == [f"its model is gone: {source}"]
    assert is_kept(cache, copy)


def test_prune_goes_on_where_another_process_has_removed_a_file(cache, source, monkeypatch):
    keep(cache, source)
    keep(cache, source, format="int8")
    gone, left = cache.folder.iterdir()
    found = cache._files()
    gone.unlink()
    monkeypatch.setattr(PackedCache, "_files", lambda self: found)
    assert cache.prune() == []
    assert cache.num_bytes == left.stat().st_size
    assert [file.name for file in cache.prune(everything=True)] == [left.name]


def test_prune_leaves_what_was_packed_of_a_model_that_may_not_be_read(cache, source, monkeypatch):
    def refuse(path):
        raise PermissionError(path)

    keep(cache, source)
    monkeypatch.setattr(packed_cache, "samples_of", refuse)
    assert cache.prune() == []
    assert len(names(cache)) == 1


def test_prune_of_everything_leaves_nothing(cache, source):
    keep(cache, source)
    size = cache.num_bytes
    assert [file.num_bytes for file in cache.prune(everything=True)] == [size]
    assert names(cache) == []


def test_prune_of_no_folder_removes_nothing(cache):
    assert cache.prune() == []


def test_a_key_is_json(source):
    key = described(source).key()
    assert json.loads(json.dumps(key)) == key


def test_warnings_say_what_to_do(tmp_path, source, caplog):
    (tmp_path / "file").write_text("")
    caplog.set_level(logging.WARNING)
    keep(PackedCache(folder=tmp_path / "file" / "packed", most_bytes=1 << 30, least_bytes=0), source)
    assert "FORERUN_CACHE" in caplog.text
    assert "FORERUN_PACKED_CACHE_GB=0" in caplog.text
