"""What a drafter takes of an engine's memory, as plans count it without loading anything, and as the engine does."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from forerun.config.gpu_memory import MemoryShare
from forerun.config.kv_memory import kv_bytes_of, plan_kv
from forerun.config.settings import EngineSettings
from forerun.drafters.auto import AutoConfig
from forerun.drafters.registry import DRAFTERS
from forerun.errors import ConfigError
from forerun.kv.cache import bytes_per_block
from forerun.models.loader import expected_bytes
from forerun.models.store import model_path
from forerun.ops.native.formats import WEIGHT_FORMATS
from forerun.plan.drafter_memory import (
    AUTO_MEMORY,
    LEAST_ROUNDED,
    LEAST_WIDTHS,
    MOST_ROUNDED,
    NOTHING,
    drafter_memory,
    kv_memory,
    models_of,
    num_blocks,
)
from tests.contract.drafters import Stub
from tests.engines import tiny_target
from tests.plan.profiles import fake_profile
from tests.tiny_gguf import save_tiny_gguf
from tests.tiny_models import save_tiny_model

PROFILE = fake_profile()
ON_GPU = replace(PROFILE, device="cuda", kernels="triton")
HEAD = PROFILE.configs["head"]


def head_in(folder):
    """A head's folder: a matrix that is loaded at the engine's dtype, and a map of tokens that is not."""
    save_file({"fc.weight": np.zeros((8, 4), np.float32), "d2t": np.zeros(5, np.int64)}, folder / "model.safetensors")
    return HEAD | {"model": str(folder)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_draft_model_takes_the_bytes_that_the_engine_expects_of_it(dtype, tmp_path):
    folder = save_tiny_model(tmp_path, "LlamaForCausalLM")
    found = drafter_memory(replace(PROFILE, dtype=dtype), {"method": "draft_model", "model": str(folder)})
    assert found.models == (expected_bytes(folder, dtype=getattr(torch, dtype)),)


def test_a_head_is_loaded_at_the_engines_dtype_and_its_map_of_tokens_as_it_is(tmp_path):
    config = head_in(tmp_path)
    assert drafter_memory(PROFILE, config).models == (2 * 32 + 8 * 5,)
    assert drafter_memory(PROFILE, config | {"quantization": "int8"}).models == (34 + 8 * 5,)


def test_the_files_that_an_index_names_are_counted_and_no_others(tmp_path):
    config = head_in(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "part.safetensors")
    (tmp_path / "other.safetensors").write_bytes((tmp_path / "part.safetensors").read_bytes())
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "part.safetensors", "b": "part.safetensors"}}'
    )
    assert drafter_memory(PROFILE, config).models == (2 * 32 + 8 * 5,)


def test_blocks_of_a_gguf_file_stay_blocks_on_the_kernels_and_become_dense_elsewhere(tmp_path):
    path = tmp_path / "tiny.gguf"
    save_tiny_gguf(path, kinds=["Q4_0"])
    blocks, dense = (
        drafter_memory(profile, {"method": "draft_model", "model": str(path)}).models[0]
        for profile in (PROFILE, ON_GPU)
    )
    assert 0 < blocks < 0.7 * dense
    in_fp32, config = replace(PROFILE, dtype="float32"), {"method": "draft_model", "model": str(path)}
    assert drafter_memory(in_fp32, config).models == (2 * dense,), "of which the kernels keep no blocks"
    (rounded,) = drafter_memory(PROFILE, config | {"quantization": "int8"}).models
    assert blocks < rounded < dense


def test_an_embedding_is_not_rounded(tmp_path):
    weights = {"model.embed_tokens.weight": np.zeros((8, 4), np.float16), "fc.weight": np.zeros((8, 4), np.float16)}
    save_file(weights, tmp_path / "model.safetensors")
    config = {"method": "draft_model", "model": str(tmp_path), "quantization": "int8"}
    assert drafter_memory(PROFILE, config).models == (2 * 32 + 34,)


def test_quantized_weights_that_are_widened_as_they_are_loaded_are_said(tmp_path):
    """As on a GPU, which has no blocks."""
    config = head_in(tmp_path)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    assert drafter_memory(PROFILE, config).models == (2 * 32 + 8 * 5,)
    found = drafter_memory(ON_GPU, config)
    assert not found.models
    assert "hold weights that are widened" in found.unknown[0]


def test_a_known_model_is_a_drafter_of_known_size(tmp_path, monkeypatch):
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    folder = model_path("smollm2-135m")
    folder.mkdir(parents=True)
    head_in(folder)
    assert drafter_memory(PROFILE, {"method": "draft_model", "model": "smollm2-135m"}).models == (2 * 32 + 8 * 5,)


@pytest.mark.parametrize("model", ["org/head", "./nowhere", "smollm2-1b", "~nobody/head", "x" * 5000])
def test_a_drafter_that_is_not_on_this_machine_is_said(model):
    (weights, blocks) = drafter_memory(PROFILE, {"method": "eagle3", "model": model}).unknown
    assert weights.startswith(f"weights of the drafter {model!r:.80}")
    assert "each KV block" in blocks


def a_file(header):
    """A file of safetensors, by its header alone."""
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 20,
        a_file(b"{}"),
        a_file(b'{"a": 1}  '),
        a_file(b'{"a": {"dtype": "F16", "shape": [-8]}}'),
        a_file(b'{"a": {"dtype": "F16", "shape": [1' + b"0" * 400 + b"]}}"),
        a_file(b'{"a": {"dtype": "I64", "data_offsets": []}}'),
        a_file(b"[" * 100_000),
    ],
)
def test_files_that_cannot_be_read_are_said(content, tmp_path):
    config = head_in(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    found = drafter_memory(PROFILE, config)
    assert not found.models
    assert "cannot be read" in found.unknown[0]


@pytest.mark.parametrize("model", ["ngram", "[suffix]"])
def test_a_model_that_names_a_method_is_that_method(model):
    assert drafter_memory(PROFILE, {"model": model}) == NOTHING


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_the_target_in_fewer_bits_takes_less_than_the_target(bits):
    (weights,) = drafter_memory(PROFILE, {"method": "self", "quantization": bits}).models
    assert PROFILE.weight_bytes / 2 < weights < PROFILE.weight_bytes, "of bf16, which the kernels may keep in 1.5 bytes"
    assert drafter_memory(PROFILE, {"method": "self", "exit_layer": 4}) == NOTHING


def test_the_target_in_fewer_bits_is_counted_by_its_files(tmp_path):
    """Which are loaded again: of a target that is in blocks of 4 bits already they say how many weights these are."""
    path, config = tmp_path / "tiny.gguf", {"method": "self", "quantization": "int8"}
    save_tiny_gguf(path, kinds=["Q4_0"])
    target = replace(PROFILE, model=str(path))
    drafter = {"method": "draft_model", "model": str(path), "quantization": "int8"}
    assert drafter_memory(target, config).models == drafter_memory(target, drafter).models
    gone, quantized = replace(PROFILE, model="no/such.gguf"), replace(PROFILE, model=str(tmp_path))
    path.unlink()
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    for unknown in (gone, quantized):
        (most,) = drafter_memory(unknown, config).models
        assert most > 1.8 * PROFILE.weight_bytes, "of weights that may be in little more than 4 bits"


def test_models_are_those_of_a_drafter_and_of_all_within_it():
    within = [{"method": "suffix"}, {"model": "org/head"}, {"method": "auto", "drafter": {"model": "./mine"}}]
    assert models_of({"method": "hybrid", "drafters": within}) == ["org/head", "./mine"]
    assert models_of({"model": "a", "drafters": 5}) == ["a"]
    assert models_of(None) == models_of({"model": 5}) == []


def test_widths_are_those_of_the_kernels_formats():
    rounded = [one for one in WEIGHT_FORMATS.values() if one.is_quantization]
    assert max(max(one.bytes_per_weight, one.bytes_per_head_weight) for one in rounded) == MOST_ROUNDED
    assert min(one.bytes_per_weight for one in rounded) == LEAST_ROUNDED
    dense = [one for one in WEIGHT_FORMATS.values() if not one.is_quantization]
    for dtype in ("float32", "bfloat16"):
        of_dtype = [one.bytes_per_weight for one in dense if one.activations == getattr(torch, dtype)]
        assert LEAST_WIDTHS[dtype] == min(of_dtype)


def test_auto_takes_its_share_and_the_drafter_that_it_is_given(tmp_path):
    assert AutoConfig().auto_memory == AUTO_MEMORY
    assert drafter_memory(PROFILE, {"method": "auto"}).tables == 0.1 * PROFILE.weight_bytes
    assert drafter_memory(PROFILE, {"method": "auto", "auto_memory": 0.5}).tables == 0.5 * PROFILE.weight_bytes
    given = drafter_memory(PROFILE, {"method": "auto", "drafter": head_in(tmp_path)})
    assert (given.models, given.tables) == ((104,), 0.1 * PROFILE.weight_bytes)


@pytest.mark.parametrize("share", ["x", -1.0, 1e300, True, None])
def test_a_share_that_auto_does_not_take_is_said(share):
    (unknown, _) = drafter_memory(PROFILE, {"method": "auto", "auto_memory": share}).unknown
    assert unknown == "what auto may take, a share of the target's weights"


def test_auto_takes_nothing_where_a_gpu_looks_up_by_itself():
    assert drafter_memory(ON_GPU, {"method": "auto"}) == NOTHING
    by_torch = replace(ON_GPU, kernel_settings={"device_step": False})
    found = drafter_memory(by_torch, {"method": "auto"})
    assert found.tables
    assert found.unknown[0] == "the drafter that auto may find for itself", "which would lie in the memory of the GPU"
    measured = replace(ON_GPU, configs=ON_GPU.configs | {"head": {"method": "auto"}}, drafter_block_bytes={"head": 7})
    assert drafter_memory(measured, {"method": "auto"}).block == 7, "where it drafts with a head after all"


def test_a_hybrid_takes_what_its_drafters_take(tmp_path):
    config = {
        "method": "hybrid",
        "drafters": [{"method": "suffix"}, head_in(tmp_path), {"method": "self", "quantization": "int8"}],
    }
    head, own = drafter_memory(PROFILE, config).models
    assert head == 104
    assert (own,) == drafter_memory(PROFILE, config["drafters"][2]).models


def test_mtp_layers_are_counted_where_the_target_is_here(tmp_path):
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 30}')
    here = replace(PROFILE, model=str(tmp_path))
    assert drafter_memory(here, {"method": "mtp"}).models == (2 * PROFILE.weight_bytes // 30,)
    assert "MTP layers" in drafter_memory(PROFILE, {"method": "mtp"}).unknown[0]


@pytest.mark.parametrize("method", DRAFTERS)
def test_every_method_is_counted_or_has_a_model(method, tmp_path):
    config = {"method": method, "quantization": "int8", "drafters": []}
    if "model" in {one.name for one in fields(DRAFTERS[method].config_class)}:
        config |= {"model": head_in(tmp_path)["model"]}
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 30}')
    found = drafter_memory(replace(PROFILE, model=str(tmp_path)), config)
    assert not any("weights" in what for what in found.unknown)


@pytest.mark.parametrize(
    "config", [{"method": "custom_class", "model": "my.Drafter"}, {"method": "hybrid", "drafters": 5}]
)
def test_a_drafter_of_the_users_own_is_said(config):
    assert drafter_memory(PROFILE, config).unknown[0].startswith("weights of the drafter")


class WithKV(Stub):
    """A head, by what its KV takes."""

    needs = frozenset({"last_hidden"})
    kv_bytes_per_block = 1000
    scratch_bytes = 5000
    num_scratch_blocks = 4

    def use_kv(self, target_cache, *, num_blocks): ...


def test_a_gpus_blocks_are_as_many_as_the_engine_counts(tmp_path):
    """With the same KV memory, and the drafter's part of each block: its own KV, and the features that it reads."""
    config, model, drafter = head_in(tmp_path), tiny_target().model, WithKV(None)
    size, many = PROFILE.block_size, {"max_num_seqs": 10_000, "max_num_batched_tokens": 10_000, "max_model_len": 64}
    own = bytes_per_block(model.kv_specs, block_size=size, dtype=model.dtype)
    read = bytes_per_block([], block_size=size, dtype=model.dtype, feature_widths={"last_hidden": model.hidden_size})
    part = read + drafter.kv_bytes_per_block
    profile = replace(
        ON_GPU,
        num_blocks=777,
        kv_cache_memory_bytes=777 * own,
        configs=PROFILE.configs | {"head": config},
        drafter_block_bytes={"head": part},
    )
    for given, with_it in ((None, Stub(None)), (config, drafter), (config | {"num_speculative_tokens": 1}, drafter)):
        memory = kv_memory(profile, drafter_memory(profile, given))
        settings = EngineSettings(model="tiny", block_size=size, kv_cache_memory_bytes=memory, **many)
        assert num_blocks(profile, given) == plan_kv(settings, model, with_it).num_blocks
    assert num_blocks(profile, config) == (777 * own - 104) // (own + part) < 777
    scratch = kv_bytes_of(model, drafter, block_size=size).scratch
    assert scratch == 4 * (own + read) + 5000, "blocks of the target's cache, and of its own"
    with_scratch = replace(profile, drafter_scratch_bytes={"head": scratch, "suffix": 0})
    settings = replace(settings, kv_cache_memory_bytes=None)
    share = MemoryShare(
        total=777 * own, utilization=1.0, weights=104, largest_step=0, graphs=0, libraries=0
    )  # of a GPU that the profiled engine's KV filled
    left = plan_kv(settings, model, drafter, measure=lambda: share).num_blocks
    assert num_blocks(with_scratch, config) == left == (777 * own - 104 - scratch) // (own + part)
    memory = kv_memory(with_scratch, drafter_memory(with_scratch, config))
    assert plan_kv(replace(settings, kv_cache_memory_bytes=memory), model, drafter).num_blocks == left
    assert memory + 104 + scratch <= 777 * own
    on_cpu = replace(profile, device="cpu")
    settings = replace(settings, kv_cache_memory_bytes=kv_memory(on_cpu, drafter_memory(on_cpu, config)))
    assert num_blocks(on_cpu, config) == plan_kv(settings, model, drafter).num_blocks == 777


def test_a_drafter_that_leaves_no_memory_for_kv_is_refused(tmp_path):
    config = head_in(tmp_path)
    with pytest.raises(ConfigError, match=r"takes 0 MiB for its weights and its drafts' KV, .* a block .*--method"):
        num_blocks(replace(ON_GPU, kv_cache_memory_bytes=100), config)
    unknown = replace(ON_GPU, kv_bytes_per_token=None)
    assert num_blocks(unknown, config) == PROFILE.num_blocks
    assert kv_memory(unknown, drafter_memory(unknown, config)) is None
