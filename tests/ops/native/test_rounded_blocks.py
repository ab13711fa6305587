"""Products of weights in blocks with rows of 8 or 16 bits, against rows that torch rounds, in fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.ops.block_formats import BLOCK_FORMATS
from forerun.ops.block_rounding import round_rows
from forerun.ops.block_weight import join_weights
from tests.block_products import assert_within_rounding, packed
from tests.blocks import every_block_format, tame_blocks
from tests.native import every_level, generator, threads

either_width = pytest.mark.parametrize("row_bits", [8, 16])
FLUSHING_LEVELS = ("amx", "avx512bf16")
"""Whose instruction that rounds to bf16 takes denormal numbers for zero."""


@every_level
@either_width
@every_block_format
@settings(max_examples=8)
@given(
    rows=st.integers(1, 40),
    blocks=st.integers(1, 3),
    outputs=st.integers(1, 100),
    with_bias=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_products_agree_with_their_twin(kernels, row_bits, name, rows, blocks, outputs, with_bias, seed):
    random = generator(seed)
    weight = tame_blocks(name, outputs, blocks * max(32, BLOCK_FORMATS[name].weights), seed)
    bias = torch.randn(outputs, generator=random) if with_bias else None
    x = torch.randn(rows, weight.shape[1], generator=random) * 10.0 ** torch.randint(-3, 4, (rows, 1), generator=random)
    assert_within_rounding(packed(kernels, weight, bias, row_bits=row_bits)(x), weight, bias, round_rows(x, row_bits))


@every_level
@either_width
@every_block_format
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it_and_threads_compute(kernels, row_bits, name):
    linear = packed(kernels, tame_blocks(name, 70, 512), row_bits=row_bits)
    x = torch.randn(60, 512, generator=generator(1))
    whole = linear(x)
    for count in (1, 2, 3, 4, 5, 7, 8, 12, 13, 24, 25, 37):
        for first in (0, 17):
            assert torch.equal(linear(x[first : first + count]), whole[first : first + count])
    with threads(kernels, 3):
        assert torch.equal(linear(x), whole)


@every_level
@either_width
@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("inputs", [4096])
def test_a_row_has_the_same_bits_among_rows_whose_lines_fall_into_the_same_set_of_a_cache(
    kernels, row_bits, name, inputs
):
    linear = packed(kernels, tame_blocks(name, 40, inputs), row_bits=row_bits)
    x = torch.randn(40, inputs, generator=generator(1))
    alone = torch.cat([linear(row[None]) for row in x])
    for count in (8, 9, 12, 40):
        assert torch.equal(linear(x[:count]), alone[:count]), count


@every_level
@either_width
@pytest.mark.parametrize("name", ["Q8_0", "GROUPS16"])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_products_of_bytes_fit(kernels, row_bits, name, sign):
    weight = tame_blocks(name, 40, 256)
    row = BLOCK_FORMATS[name]
    weight.data.view(40, -1, row.bytes)[..., -row.weights :] = 128  # as signed bytes -128
    x = torch.full((5, 256), sign * 3.0)
    assert_within_rounding(packed(kernels, weight, row_bits=row_bits)(x), weight, None, round_rows(x, row_bits))


@every_level
@either_width
@every_block_format
@pytest.mark.parametrize("size", [1e-36, 1e-37, 1e-39])
def test_rows_that_are_hardly_more_than_zero_are_rounded_as_their_twin(kernels, row_bits, name, size):
    weight = tame_blocks(name, 40, 256, size=100.0)
    x = torch.randn(4, 256, generator=generator(4)) * size
    found = packed(kernels, weight, row_bits=row_bits)(x)
    if kernels.level in FLUSHING_LEVELS:
        x[x.abs() < torch.finfo(torch.float32).tiny] = 0.0
    exact = round_rows(x, row_bits).double() @ weight.dequantize().double().T
    assert (found.double() - exact).abs().max() <= 1e-4 * exact.abs().max() + 256 * 2.0**-149


@every_level
@either_width
def test_rows_beyond_one_block_have_scales_of_their_own(kernels, row_bits):
    weight = tame_blocks("Q4_K", 40, 256)
    x = torch.randn(3, 256, generator=generator(2))
    x[:, :32] *= 1e6
    assert_within_rounding(packed(kernels, weight, row_bits=row_bits)(x), weight, None, round_rows(x, row_bits))


@every_level
@either_width
@every_block_format
def test_zeros_give_zeros(kernels, row_bits, name):
    found = packed(kernels, tame_blocks(name, 40, 256), row_bits=row_bits)(torch.zeros(2, 256))
    assert torch.equal(found, torch.zeros(2, 40))


@every_level
@either_width
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_no_number_makes_its_row_none_and_no_other(kernels, row_bits, value):
    linear = packed(kernels, tame_blocks("Q5_K", 40, 256), row_bits=row_bits)
    x = torch.randn(3, 256, generator=generator(3))
    expected = linear(x)
    x[1, 70] = value
    found = linear(x)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


@every_level
@either_width
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["Q4_0", "Q5_K", "Q2_K"])
def test_nothing_but_values_that_are_no_numbers_give_none(kernels, row_bits, value, name):
    linear = packed(kernels, tame_blocks(name, 40, 256), row_bits=row_bits)
    assert linear(torch.full((2, 256), value)).isnan().all()


@every_level
@either_width
def test_only_blocks_of_a_joined_weight_round_their_rows(kernels, row_bits):
    dense = torch.randn(32, 256, generator=generator(0)).bfloat16()
    blocks = tame_blocks("Q4_0", 40, 256)
    x = torch.randn(9, 256, generator=generator(1))
    found = packed(kernels, join_weights([dense, blocks]), row_bits=row_bits)(x)
    assert torch.equal(found[:, :32], packed(kernels, dense)(x))
    assert torch.equal(found[:, 32:], packed(kernels, blocks, row_bits=row_bits)(x))


@every_level
@either_width
def test_chosen_outputs_of_a_weight_round_their_rows_too(kernels, row_bits):
    linear = packed(kernels, tame_blocks("Q6_K", 70, 256), row_bits=row_bits)
    x, some = torch.randn(2, 256, generator=generator(1)), torch.tensor([3, 69, 40])
    assert torch.equal(linear.select(some)(x), linear(x)[:, some])


@every_level
@every_block_format
def test_sixteen_bits_keep_each_bit_of_inputs_that_are_not_far_smaller_than_their_blocks_largest(kernels, name):
    x = torch.randn(4, 256, generator=generator(5)).bfloat16().float()
    x = torch.where(x.abs() < 0.05, 0.05, x)  # the largest of a block of 32 is below 6
    assert torch.equal(round_rows(x, 16), x.bfloat16().float())
    weight = tame_blocks(name, 40, 256)
    assert_within_rounding(packed(kernels, weight, row_bits=16)(x), weight, None, x.bfloat16())
