"""Decoders whose matrices stay in blocks: what they compute, and that they are never widened."""

from __future__ import annotations

import pytest
import torch

from forerun.models import packing as packing_module
from forerun.models.decoder import build_decoder
from forerun.models.loader import DummyCheckpoint
from forerun.models.packing import Packing
from forerun.ops.native.attention import NativeAttention
from tests.blocks import tame_blocks
from tests.models.paged_run import PagedRun
from tests.models.random_decoders import CPU
from tests.models.state_dict import InMemoryCheckpoint, MixedCheckpoint
from tests.native import BF16, FP32, INT8, KERNELS, every_level, generator, needs_kernels
from tests.tiny_models import tiny_config

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MIXES = {
    "one format": {},
    "values in another": {"v_proj": "Q6_K"},
    "ups in another": {"up_proj": "Q6_K"},
    "values in fp32": {"v_proj": torch.float32},
    "values in fp16": {"v_proj": torch.float16},
    "ups in fp32": {"up_proj": torch.float32},
    "queries in fp16": {"q_proj": torch.float16},
    "the embedding in fp16": {"embed_tokens": torch.float16},
    "the embedding in fp32, the head in fp16": {"embed_tokens": torch.float32, "lm_head": torch.float16},
}


EXACT, FLIPPED = 1e-6, 3e-2
"""How far logits are off, relative to all of a row's, where weights are exact: but for sums in another order nothing, unless
one of them puts a value to the next bf16, which goes on from there."""


def block_source(formats, *, tied, architecture="LlamaForCausalLM"):
    """Configuration and checkpoint of a model whose matrices are Q4_K, or as `formats` says by module.

    Vectors are fp32, and no dense weight is one that bf16 holds.
    """
    config = tiny_config(architecture, **SIZES, tie_word_embeddings=tied)
    shapes = DummyCheckpoint(config, dtype=torch.float32)
    tensors = {}
    for seed, name in enumerate(sorted(shapes.names())):
        shape = shapes.shape(name)
        kind = formats.get(name.split(".")[-2], "Q8_0" if "o_proj" in name else "Q4_K")
        if len(shape) == 1 or not isinstance(kind, str):
            values = torch.randn(shape, generator=generator(seed)) * 0.05 + (len(shape) == 1)
            tensors[name] = values if len(shape) == 1 else values.to(kind)
        else:
            tensors[name] = tame_blocks(kind, *shape, seed=seed, size=2e-4)  # so that attention spreads
    return config, InMemoryCheckpoint(tensors)


def dense_source(config, checkpoint):
    """The same with the values of every matrix in fp32."""
    dense = {
        name: x.float() if isinstance(x, torch.Tensor) else x.dequantize() for name, x in checkpoint.tensors.items()
    }
    return config, MixedCheckpoint(dense)


def native(kernels, source, weight_format):
    dtype = weight_format.activations
    return build_decoder(*source, dtype=dtype, device=CPU, packing=Packing(kernels, weight_format))


def logits_of(model, kernels, cuts):
    """Logits of sixteen tokens, fed in parts."""
    run = PagedRun(model, attention=NativeAttention(kernels))
    token_ids = torch.randint(3, 60, [16], generator=generator(0))
    return torch.cat([run.feed(part).logits for part in token_ids.split(cuts)])


def differences(model, exact, kernels):
    """How far a model's logits after each of sixteen short texts are off, relative to the exact ones."""
    texts = torch.randint(3, 60, [16, 3], generator=generator(1))
    found, expected = (
        torch.cat([PagedRun(one, attention=NativeAttention(kernels)).feed(text).logits[-1:] for text in texts])
        for one in (model, exact)
    )
    return (found - expected).norm(dim=1) / expected.norm(dim=1)


@every_level
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mix", MIXES)
def test_a_decoder_on_blocks_computes_what_their_values_say(kernels, mix, tied):
    source = block_source(MIXES[mix], tied=tied)
    exact = native(kernels, dense_source(*source), BF16)
    found = differences(native(kernels, source, BF16), exact, kernels)
    assert found.min() < EXACT
    assert found.max() < FLIPPED


@every_level
@pytest.mark.parametrize("mix", ["one format", "ups in another", "ups in fp32"])
def test_experts_in_blocks_compute_what_their_values_say(kernels, mix):
    source = block_source(MIXES[mix] | {"gate": torch.float32}, tied=True, architecture="Qwen3MoeForCausalLM")
    exact = native(kernels, dense_source(*source), BF16)
    model = native(kernels, source, BF16)
    found = differences(model, exact, kernels)
    assert found.min() < EXACT
    assert found.median() < FLIPPED  # a text near a tie of two experts may go on with the other one
    assert torch.equal(logits_of(model, kernels, [1] * 16), logits_of(model, kernels, [16]))


@needs_kernels
@pytest.mark.parametrize(
    ("mix", "said"),
    [
        ("ups in another", "in Q4_K and Q6_K take up to 1.5 bytes"),
        ("ups in fp32", "in Q4_K and float32 take up to 4 bytes"),
    ],
)
def test_gates_and_ups_that_grow_in_one_format_are_told_of_once(mix, said, caplog):
    packing_module._say_larger.cache_clear()
    for _ in range(2):
        native(next(iter(KERNELS.values())), block_source(MIXES[mix], tied=True), BF16)
    (record,) = caplog.records
    assert said in record.getMessage()


@needs_kernels
@pytest.mark.parametrize("module", ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens"])
def test_nothing_is_so_near_that_rounds_even_one_kind_of_matrix_to_bf16(module):
    kernels = next(iter(KERNELS.values()))
    config, exact = dense_source(*block_source({}, tied=True))
    rounded = {n: x.bfloat16().float() if f"{module}." in n else x for n, x in exact.tensors.items()}
    exact_model, model = (native(kernels, (config, MixedCheckpoint(x)), BF16) for x in (exact.tensors, rounded))
    found = differences(model, exact_model, kernels)
    assert found.min() > 100 * EXACT


@every_level
def test_logits_on_blocks_are_the_same_bits_however_a_text_is_cut(kernels):
    model = native(kernels, block_source(MIXES["values in another"], tied=True), BF16)
    whole = logits_of(model, kernels, [16])
    assert torch.equal(logits_of(model, kernels, [1] * 16), whole)
    assert torch.equal(logits_of(model, kernels, [9, 1, 6]), whole)


@needs_kernels
def test_blocks_take_no_more_memory_than_their_file():
    kernels = next(iter(KERNELS.values()))
    config, checkpoint = block_source({}, tied=True)
    model = native(kernels, (config, checkpoint), BF16)
    stored = sum(
        x.nbytes for name, x in checkpoint.tensors.items() if not isinstance(x, torch.Tensor) and "embed" not in name
    )
    assert sum(layer.num_bytes for layer in model.layers.layers) <= 1.06 * stored


@needs_kernels
def test_blocks_are_widened_for_int8_and_for_fp32():
    kernels = next(iter(KERNELS.values()))
    source = block_source({}, tied=True)
    exact = logits_of(native(kernels, dense_source(*source), FP32), kernels, [16])
    assert torch.equal(logits_of(native(kernels, source, FP32), kernels, [16]), exact)
    assert torch.cosine_similarity(logits_of(native(kernels, source, INT8), kernels, [16]), exact).min() > 0.99
