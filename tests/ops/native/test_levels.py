"""Builds whose instructions round alike give the same bits; they differ in registers, order of work and tables only."""

from __future__ import annotations

import platform

import pytest
import torch

from forerun.ops.layers import GATINGS
from forerun.ops.native.attention import NativeAttention
from tests.block_products import packed
from tests.blocks import every_block_format, tame_blocks
from tests.models.random_decoders import native_decoder
from tests.native import BF16, FP32, INT8, KERNELS, every_format, generator, packed_linear
from tests.ops.native.passes import filled_cache, random_batch, source
from tests.ops.native.test_functions import native_gate

# On x86-64 the portable build has no fused multiplication and addition: compilers may assume none there.
ALIKE = (
    [("neon", "portable")]
    if platform.machine() in ("aarch64", "arm64")
    else [(level, "avx2") for level in ("avx512vnni", "avx512", "avxvnni")]
)
two_alike = pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(KERNELS.get(one), KERNELS.get(other), id=f"{one}-{other}")
        for one, other in ALIKE
        if {one, other} <= set(KERNELS)
    ],
)


@two_alike
@every_format
@pytest.mark.parametrize("num_rows", [1, 2, 5, 40])
def test_products_have_the_same_bits(one, other, weight_format, num_rows):
    weight, bias = torch.randn(70, 131, generator=generator(0)), torch.randn(70, generator=generator(1))
    rows = torch.randn(num_rows, 131, generator=generator(2))
    found, expected = (packed_linear(kernels, weight, bias, weight_format=weight_format) for kernels in (one, other))
    assert torch.equal(found(rows), expected(rows))


@two_alike
@every_block_format
@pytest.mark.parametrize("num_rows", [1, 2, 5, 40])
def test_products_of_blocks_have_the_same_bits(one, other, name, num_rows):
    rows = torch.randn(num_rows, 512, generator=generator(2))
    found, expected = (packed(kernels, tame_blocks(name, 70, 512)) for kernels in (one, other))
    assert torch.equal(found(rows), expected(rows))


@two_alike
@every_block_format
@pytest.mark.parametrize("row_bits", [8, 16])
def test_products_of_blocks_with_rounded_rows_have_the_same_bits(one, other, name, row_bits):
    rows = torch.randn(30, 256, generator=generator(2))
    found, expected = (packed(kernels, tame_blocks(name, 70, 256), row_bits=row_bits) for kernels in (one, other))
    assert torch.equal(found(rows), expected(rows))


@two_alike
@pytest.mark.parametrize("gating", GATINGS)
def test_gates_have_the_same_bits(one, other, gating):
    gates = torch.cat([torch.linspace(-100, 100, 2001), torch.logspace(-30, 4, 60), -torch.logspace(-30, 4, 60)])
    ups = torch.randn(len(gates), generator=generator(0))
    assert torch.equal(native_gate(one, gates, ups, gating), native_gate(other, gates, ups, gating))


@two_alike
@pytest.mark.parametrize("variant", ["LlamaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"])
@pytest.mark.parametrize("weight_format", [FP32, BF16, INT8], ids=lambda value: value.name)
def test_all_layers_of_a_pass_have_the_same_bits(one, other, variant, weight_format):
    def outputs(kernels):
        decoder = native_decoder(kernels, variant, weight_format=weight_format)
        batch, num_blocks = random_batch(source(1), [(30, 1), (9, 6), (0, 11), (280, 3)], block_size=4)
        cache = filled_cache(decoder.kv_specs, num_blocks=num_blocks, block_size=4, dtype=decoder.dtype)
        hidden = torch.randn(len(batch.positions), decoder.hidden_size, generator=generator(0))
        attend = NativeAttention(kernels).begin(batch, cache)
        return decoder.layers(hidden, decoder.rotations(batch.positions), attend, 0, decoder.num_layers)

    assert torch.equal(outputs(one), outputs(other))
