"""gpt-oss's experts in MXFP4: their values, and models that hold them."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from forerun.errors import ModelError
from forerun.models.checkpoint import dense
from forerun.models.loader import load_model
from forerun.models.packing import Packing
from forerun.models.quantized import quantized_layout
from forerun.models.quantized.checkpoint import QuantizedCheckpoint
from tests.models.paged_run import PagedRun
from tests.models.state_dict import InMemoryCheckpoint
from tests.native import KERNELS, needs_kernels
from tests.tiny_models import save_tiny_model

SETTINGS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
STACK = "model.layers.0.mlp.experts.down_proj"
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


def random_parts(seed, experts, outputs, inputs):
    """The two tensors of all experts, and their values [experts, outputs, inputs]."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 16, (experts, outputs, inputs))
    exponents = random.integers(-12, 2, (experts, outputs, inputs // 32))
    values = np.empty(codes.shape, dtype=np.float32)
    pairs = np.zeros((experts, outputs, inputs // 32, 16), dtype=np.uint8)
    for (expert, output, i), code in np.ndenumerate(codes):
        sign = -1.0 if code & 8 else 1.0
        values[expert, output, i] = sign * NUMBERS[code & 7] * 2.0 ** exponents[expert, output, i // 32]
        pairs[expert, output, i // 32, i % 32 // 2] |= code << 4 * (i % 2)
    scales = (exponents + 127).astype(np.uint8)
    return {"blocks": torch.from_numpy(pairs), "scales": torch.from_numpy(scales)}, torch.from_numpy(values)


def opened(parts):
    tensors = {f"{STACK}_{suffix}": tensor for suffix, tensor in parts.items()}
    return QuantizedCheckpoint(InMemoryCheckpoint(tensors), quantized_layout(SETTINGS))


def quantize(folder):
    """Replace the matrices of all experts by random ones in MXFP4; return all tensors with their values instead."""
    tensors = load_file(folder / "model.safetensors")
    values = dict(tensors)
    for number, name in enumerate(sorted(tensors)):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = tensors.pop(name).shape
            parts, found = random_parts(number, experts, outputs, inputs)
            tensors |= {f"{name}_{suffix}": part for suffix, part in parts.items()}
            values[name] = found.mT.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"quantization_config": SETTINGS}))
    return values


def test_values_are_those_of_the_format_and_of_transformers():
    parts, values = random_parts(0, 3, 10, 64)
    checkpoint = opened(parts)
    assert checkpoint.names() == {f"{STACK}.weight"}
    assert checkpoint.shape(f"{STACK}.weight") == (3, 10, 64)
    found = dense(checkpoint.load(f"{STACK}.weight")).view(3, 10, 64)
    assert torch.equal(found, values)
    theirs = convert_moe_packed_tensors(parts["blocks"], parts["scales"], dtype=torch.float32)
    assert torch.equal(found.mT, theirs)


def test_a_model_has_the_logits_of_its_values(tmp_path):
    plain = save_tiny_model(tmp_path / "plain", "GptOssForCausalLM", **SIZES)
    folder = save_tiny_model(tmp_path / "quantized", "GptOssForCausalLM", **SIZES)
    save_file(quantize(folder), plain / "model.safetensors", metadata={"format": "pt"})
    found, expected = (
        PagedRun(load_model(path, dtype=torch.float32, device=torch.device("cpu"))).feed([5, 6, 7]).logits
        for path in (folder, plain)
    )
    assert torch.equal(found, expected)


@needs_kernels
def test_the_kernels_keep_the_blocks_of_each_expert(tmp_path):
    folder = save_tiny_model(tmp_path, "GptOssForCausalLM", **SIZES)
    values = quantize(folder)
    packing = Packing.choose(next(iter(KERNELS.values())), dtype=torch.bfloat16)
    model = load_model(folder, dtype=torch.bfloat16, device=torch.device("cpu"), packing=packing)
    for index, layer in enumerate(model.layers.layers):
        _, *weights = layer.experts.weights
        assert {weight.format.name for weight in weights} == {"MXFP4"}
        for number, down in enumerate(weights[len(weights) // 2 :]):
            assert torch.equal(down.unpack(), values[f"model.layers.{index}.mlp.experts.down_proj"][number].mT)


@pytest.mark.parametrize(
    ("suffix", "spoil", "said"),
    [
        ("scales", lambda scales: scales[:, :, :1], r"'scales' has shape \[2, 4, 1\], expected \[2, 4, 2\]"),
        ("scales", lambda scales: scales[0], "expected 3 dimensions"),
        ("blocks", lambda blocks: blocks[..., :8], r"'blocks' has shape .* expected \[2, 4, 2, 16\]"),
        ("blocks", lambda blocks: blocks.int(), r"of torch.int32, expected torch.uint8"),
    ],
)
def test_a_part_that_is_not_what_it_must_be_is_named(suffix, spoil, said):
    parts, _ = random_parts(0, 2, 4, 64)
    with pytest.raises(ModelError, match=said):
        opened(parts | {suffix: spoil(parts[suffix]).contiguous()}).load(f"{STACK}.weight")


def test_a_missing_part_is_named():
    parts, _ = random_parts(0, 2, 4, 64)
    with pytest.raises(ModelError, match=r"down_proj.weight is quantized, but its part 'scales' is missing"):
        opened({"blocks": parts["blocks"]})
