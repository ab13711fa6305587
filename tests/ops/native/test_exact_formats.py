"""Weights that are not of the rows' dtype: their products have the bits of fp32 weights with the same values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.ops.block_weight import join_weights
from forerun.ops.native.formats import exact_format, pack_weight
from forerun.ops.native.formats.joined import JOINED
from forerun.ops.native.formats.plain import BF16, EXACT_FP16, EXACT_FP32, FP16, FP32
from forerun.ops.native.layers import PackedLinear
from forerun.ops.native.memory import Arena
from tests.blocks import tame_blocks
from tests.native import INT8, every_level, generator, packed_linear, threads

EVERY_BITS = (
    torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16)
)  # fp16 has so many
formats = pytest.mark.parametrize("stored", [FP16, EXACT_FP16, EXACT_FP32], ids=lambda row: row.name)


def random_weight(stored, outputs, inputs, seed):
    """Weights that the format holds and bf16 does not."""
    return torch.randn(outputs, inputs, generator=generator(seed)).to(stored.stored)


def rounded(x, stored):
    """Rows as the format takes them."""
    return x.to(stored.activations).float()


@every_level
@formats
@settings(max_examples=10)
@given(
    rows=st.integers(1, 110),
    outputs=st.integers(1, 70),
    inputs=st.integers(1, 40),
    with_bias=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_products_have_the_bits_of_fp32_weights(kernels, stored, rows, outputs, inputs, with_bias, seed):
    random = generator(seed)
    weight = random_weight(stored, outputs, inputs, seed)
    bias = torch.randn(outputs, generator=random) if with_bias else None
    x = torch.randn(rows, inputs, generator=random)
    found = packed_linear(kernels, weight, bias, weight_format=stored)(x)
    assert torch.equal(found, packed_linear(kernels, weight.float(), bias, weight_format=FP32)(rounded(x, stored)))


@every_level
@formats
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it_and_threads_compute(kernels, stored):
    linear = packed_linear(kernels, random_weight(stored, 70, 64, 0), weight_format=stored)
    x = torch.randn(110, 64, generator=generator(1))
    whole = linear(x)
    for first, count in ((0, 1), (3, 2), (40, 12), (47, 2), (0, 49), (50, 60)):
        assert torch.equal(linear(x[first : first + count]), whole[first : first + count])
    with threads(kernels, 3):
        assert torch.equal(linear(x), whole)


@every_level
@pytest.mark.parametrize("stored", [FP16, EXACT_FP16], ids=lambda row: row.name)
def test_every_number_of_fp16_is_kept(kernels, stored):
    weight = EVERY_BITS.nan_to_num().view(256, 256)
    linear = packed_linear(kernels, weight, weight_format=stored)
    assert torch.equal(linear.weight.unpack(), weight)
    assert torch.equal(linear.rows(torch.arange(256)), weight.float())


@every_level
@formats
def test_chosen_outputs_have_their_weights(kernels, stored):
    weight = random_weight(stored, 70, 32, 0)
    chosen = torch.tensor([69, 0, 17, 40, *range(33)])
    linear = packed_linear(kernels, weight, torch.arange(70.0), weight_format=stored)
    x = torch.randn(3, 32, generator=generator(1))
    assert torch.equal(linear.select(chosen)(x), linear(x)[:, chosen])
    assert linear.weight.num_bytes == stored.bytes_per_weight * 96 * 32 + 96 * 4


@every_level
def test_weights_of_several_dtypes_and_blocks_are_one_exact_product(kernels):
    parts = [
        random_weight(EXACT_FP32, 32, 256, 0),
        tame_blocks("Q4_K", 32, 256),
        random_weight(EXACT_FP16, 64, 256, 1),
        random_weight(EXACT_FP16, 5, 256, 2).bfloat16(),
    ]
    packed = pack_weight(kernels, BF16, join_weights(parts), None, Arena())
    assert packed.format is JOINED
    assert [part.format.name for part in packed.parts] == ["fp32-exact", "Q4_K", "fp16-exact", "bf16"]
    whole, x = PackedLinear(kernels, packed), torch.randn(50, 256, generator=generator(3))
    singly = [PackedLinear(kernels, pack_weight(kernels, BF16, part, None, Arena()))(x) for part in parts]
    assert torch.equal(whole(x), torch.cat(singly, dim=1))


@pytest.mark.parametrize(
    ("dense", "dtype", "expected"),
    [
        (BF16, torch.bfloat16, BF16),
        (BF16, torch.float16, EXACT_FP16),
        (BF16, torch.float32, EXACT_FP32),
        (FP32, torch.float16, FP16),
        (FP32, torch.float32, FP32),
        (INT8, torch.float16, INT8),
    ],
)
def test_a_weight_gets_the_format_that_keeps_it(dense, dtype, expected):
    assert exact_format(dense, torch.full((2, 2), 1 + 2**-10).to(dtype)) is expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_values_that_bf16_holds_are_kept_in_bf16(dtype):
    assert exact_format(BF16, torch.full((2, 2), 0.75, dtype=dtype)) is BF16
