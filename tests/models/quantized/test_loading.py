"""A whole model with quantized weights computes what the same model with their values written out computes."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.build import build_engine
from forerun.config.settings import EngineSettings
from forerun.errors import ConfigError, ModelError
from forerun.models.loader import load_model
from forerun.models.packing import Packing
from tests.models.paged_run import PagedRun
from tests.models.quantized.checkpoints import (
    awq_parts,
    compressed_parts,
    compressed_settings,
    gptq_parts,
    random_groups,
)
from tests.native import KERNELS, needs_kernels
from tests.tiny_models import save_tiny_model

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
METHODS = {
    "gptq": (GPTQ, lambda codes, zeros, scales: gptq_parts(codes, zeros, scales, group_size=32)),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq_parts),
    "compressed-tensors": (compressed_settings(), compressed_parts),
}


def every_other(i, group_size):
    """Two groups, whose inputs take turns: nothing that blocks have scales for."""
    return i % 2


def write_every_other(codes, zeros, scales):
    """Such a module of GPTQ with act-order."""
    parts = gptq_parts(codes, zeros, scales, group_size=32)
    return parts | {"g_idx": torch.arange(codes.shape[1], dtype=torch.int32) % 2}


def quantize(folder, config, write, *, symmetric, **groups):
    """Replace the layers' matrices by random quantized ones; return the same tensors with their values instead."""
    tensors = load_file(folder / "model.safetensors")
    values = dict(tensors)
    for number, name in enumerate(sorted(tensors)):
        if not name.endswith("_proj.weight"):
            continue
        outputs, inputs = tensors.pop(name).shape
        codes, zeros, scales, dense = random_groups(
            number, group_size=32, outputs=outputs, inputs=inputs, symmetric=symmetric, **groups
        )
        tensors |= {name.replace("weight", suffix): part for suffix, part in write(codes, zeros, scales).items()}
        values[name] = torch.from_numpy(dense).float()
        assert np.array_equal(values[name].double().numpy(), dense)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"quantization_config": config}))
    return values


@pytest.mark.parametrize("method", METHODS)
def test_a_quantized_model_has_the_logits_of_its_values(tmp_path, method):
    config, write = METHODS[method]
    plain = save_tiny_model(tmp_path / "plain", **SIZES)
    folder = save_tiny_model(tmp_path / "quantized", **SIZES)
    values = quantize(folder, config, write, symmetric=method == "compressed-tensors")
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    found, expected = (
        PagedRun(load_model(path, dtype=torch.float32, device=torch.device("cpu"))).feed([5, 6, 7]).logits
        for path in (folder, plain)
    )
    assert torch.equal(found, expected)


@needs_kernels
@pytest.mark.parametrize(("method", "blocks"), [("gptq", "Q5_0"), ("awq", "Q5_0"), ("compressed-tensors", "Q4_0")])
def test_the_kernels_keep_its_blocks(tmp_path, method, blocks):
    folder = save_tiny_model(tmp_path, **SIZES)
    values = quantize(folder, *METHODS[method], symmetric=blocks == "Q4_0")
    packing = Packing.choose(next(iter(KERNELS.values())), dtype=torch.bfloat16)
    model = load_model(folder, dtype=torch.bfloat16, device=torch.device("cpu"), packing=packing)
    for index, layer in enumerate(model.layers.layers):
        qkv, output, down = (layer.weights[name] for name in ("qkv", "output", "down"))
        assert {part.format.name for part in (qkv, output, down)} == {blocks}
        prefix = f"model.layers.{index}."
        projections = [values[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"]
        assert torch.equal(qkv.unpack(), torch.cat(projections))
        assert torch.equal(down.unpack(), values[f"{prefix}mlp.down_proj.weight"])


def test_a_model_with_act_order_has_the_logits_of_its_values(tmp_path):
    plain = save_tiny_model(tmp_path / "plain", **SIZES)
    folder = save_tiny_model(tmp_path / "quantized", **SIZES)
    values = quantize(folder, GPTQ | {"desc_act": True}, write_every_other, symmetric=False, group_of=every_other)
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    found, expected = (
        PagedRun(load_model(path, dtype=torch.float32, device=torch.device("cpu"))).feed([5, 6, 7]).logits
        for path in (folder, plain)
    )
    assert torch.equal(found, expected)


@needs_kernels
def test_the_kernels_keep_all_values_of_a_model_with_act_order(tmp_path):
    folder = save_tiny_model(tmp_path, **SIZES)
    values = quantize(folder, GPTQ | {"desc_act": True}, write_every_other, symmetric=False, group_of=every_other)
    packing = Packing.choose(next(iter(KERNELS.values())), dtype=torch.bfloat16)
    model = load_model(folder, dtype=torch.bfloat16, device=torch.device("cpu"), packing=packing)
    for index, layer in enumerate(model.layers.layers):
        prefix = f"model.layers.{index}."
        projections = [values[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"]
        assert torch.equal(layer.weights["qkv"].unpack(), torch.cat(projections))
        assert torch.equal(layer.weights["down"].unpack(), values[f"{prefix}mlp.down_proj.weight"])


def test_a_bias_of_zeros_that_the_model_has_no_place_for_is_left_out(tmp_path):
    folder = save_tiny_model(tmp_path / "quantized", **SIZES)
    quantize(folder, *METHODS["gptq"], symmetric=False)
    tensors = load_file(folder / "model.safetensors")
    bias = "model.layers.0.mlp.down_proj.bias"
    save_file(tensors | {bias: torch.zeros(64)}, folder / "model.safetensors")
    load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    save_file(tensors | {bias: torch.ones(64)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"surplus tensor 'model\.layers\.0\.mlp\.down_proj\.bias'"):
        load_model(folder, dtype=torch.float32, device=torch.device("cpu"))


def test_weights_that_are_quantized_already_are_not_rounded_again(tmp_path):
    folder = save_tiny_model(tmp_path, **SIZES)
    quantize(folder, *METHODS["gptq"], symmetric=False)
    with pytest.raises(ConfigError, match=r"got 'int8', but the checkpoint's weights are quantized already \(gptq\)"):
        build_engine(EngineSettings(model=str(folder), quantization="int8", device="cpu"))
