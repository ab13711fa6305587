"""Packed weights against their torch twins, and that a row's result does not depend on the rows beside it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.ops.layers import Embedding, Head, Linear, RMSNorm
from forerun.ops.native.formats.int8 import quantize
from forerun.ops.native.layers import NativeRMSNorm, PackedEmbedding, PackedHead, PackedLinear
from forerun.ops.native.memory import Arena
from tests.native import (
    BF16,
    BF16_CODED,
    FP32,
    INT8,
    KERNELS,
    every_format,
    every_level,
    generator,
    needs_kernels,
    packed_linear,
    threads,
)

ROUNDING = 2.0**-24  # of one fp32 operation, relative
ROW_COUNTS = (1, 2, 3, 5, 7, 8, 16, 300)


def rounded_for(weight_format, x):
    """Rows as the kernels read them."""
    return x.to(weight_format.activations).float()


def strided(rows, columns, random):
    """[rows, columns] that are every second value of every second row of something larger."""
    return torch.randn(2 * rows, 2 * columns, generator=random)[::2, 1::2]


def assert_within_rounding(found, linear, x):
    """Compare with the twin in fp64.

    A sum of n fp32 products errs by at most n roundings of the sum of their absolute values (Higham,
    Accuracy and Stability, 3.1); scale, bias and the weight that `unpack` rounds add one each.
    """
    weight = linear.weight.unpack().double()
    bias = None if linear.weight.bias is None else linear.weight.bias[: linear.weight.outputs].double()
    x = rounded_for(linear.weight.format, x).double()
    exact = Linear(weight, bias)(x)
    magnitude = Linear(weight.abs(), None if bias is None else bias.abs())(x.abs())
    bound = (x.shape[-1] + 4) * ROUNDING * magnitude
    assert ((found.double() - exact).abs() <= bound).all()


# --- agreement ------------------------------------------------------------------------------------


@every_level
@every_format
@settings(max_examples=25)
@given(
    rows=st.integers(1, 40),
    inputs=st.integers(1, 130),
    outputs=st.integers(1, 100),
    with_bias=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_linear_agrees_with_its_twin_whatever_shape_and_strides(
    kernels, weight_format, rows, inputs, outputs, with_bias, seed
):
    random = generator(seed)
    bias = torch.randn(outputs, generator=random) if with_bias else None
    linear = packed_linear(kernels, strided(outputs, inputs, random), bias, weight_format=weight_format)
    x = strided(rows, inputs, random)
    assert_within_rounding(linear(x), linear, x)


@every_level
@every_format
def test_linear_keeps_leading_dimensions_and_dtype(kernels, weight_format):
    linear = packed_linear(kernels, torch.randn(7, 6), weight_format=weight_format)
    x = torch.randn(2, 3, 6, dtype=torch.bfloat16)
    found = linear(x)
    assert (found.shape, found.dtype) == ((2, 3, 7), torch.bfloat16)
    assert torch.equal(found.view(6, 7), linear(x.view(6, 6)))


@every_level
def test_linear_of_no_rows_is_empty(kernels):
    assert packed_linear(kernels, torch.randn(7, 6), weight_format=BF16)(torch.empty(0, 6)).shape == (0, 7)


@every_level
@every_format
def test_products_are_fp32_whatever_dtype_new_tensors_have(kernels, weight_format):
    linear = packed_linear(kernels, torch.randn(40, 24), weight_format=weight_format)
    x, ids = torch.randn(3, 24), torch.tensor([39, 0])
    expected = linear(x), linear.rows(ids)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        found = linear(x), linear.rows(ids)
    finally:
        torch.set_default_dtype(before)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
        assert one.dtype == torch.float32


@every_level
@every_format
def test_unpacked_weights_are_those_that_were_packed_where_nothing_is_rounded(kernels, weight_format):
    weight = torch.randn(45, 40).to(weight_format.activations)
    unpacked = weight_format.pack(kernels, weight, None, Arena()).unpack()
    assert torch.equal(unpacked, weight) is not weight_format.is_quantization


def weight_with_rare_bytes(outputs, inputs, num_rare, random):
    """bf16 weights of few magnitudes, but for `num_rare` of any bits at all, infinities and NaNs included."""
    weight = (0.5 + torch.rand(outputs, inputs, generator=random)).to(torch.bfloat16)
    weight *= torch.randint(2, weight.shape, generator=random) * 2 - 1
    places = torch.randperm(weight.numel(), generator=random)[:num_rare]
    weight.view(-1).view(torch.int16)[places] = torch.randint(-(2**15), 2**15, (num_rare,), generator=random).short()
    return weight


@every_level
@settings(max_examples=25)
@given(outputs=st.integers(65, 200), inputs=st.integers(100, 131), rare=st.integers(0, 6), seed=st.integers(0, 2**20))
def test_coded_weights_keep_every_bit(kernels, outputs, inputs, rare, seed):
    weight = weight_with_rare_bytes(outputs, inputs, rare, generator(seed))
    packed = BF16_CODED.pack(kernels, weight, None, Arena())
    assert packed.rare is not None
    assert torch.equal(packed.unpack().view(torch.int16), weight.view(torch.int16))
    rows = PackedLinear(kernels, packed).rows(torch.arange(outputs))
    torch.testing.assert_close(rows, weight.float(), rtol=0, atol=0, equal_nan=True)


@every_level
@settings(max_examples=25)
@given(rows=st.integers(1, 40), rare=st.integers(0, 20), seed=st.integers(0, 2**20))
def test_products_with_coded_weights_have_the_bits_of_plain_ones(kernels, rows, rare, seed):
    random = generator(seed)
    weight = weight_with_rare_bytes(250, 90, rare, random)
    weight[~weight.isfinite()] = 1e30
    coded, plain = (packed_linear(kernels, weight, weight_format=weight_format) for weight_format in (BF16_CODED, BF16))
    x = torch.randn(rows, 90, generator=random)
    assert coded.weight.rare is not None
    assert torch.equal(coded(x), plain(x))


@every_level
def test_a_coded_weight_has_twelve_bits_each(kernels):
    weight = torch.randn(640, 1024)
    coded, plain = (packed_linear(kernels, weight, weight_format=weight_format) for weight_format in (BF16_CODED, BF16))
    assert coded.num_bytes == pytest.approx(0.75 * plain.num_bytes, rel=0.01)


@every_level
def test_a_weight_of_many_magnitudes_is_not_coded(kernels):
    weight = torch.randn(64, 100) * torch.logspace(-30, 30, 100)
    packed = BF16_CODED.pack(kernels, weight, torch.ones(64), Arena())
    assert packed.rare is None
    assert torch.equal(packed.unpack(), weight.to(torch.bfloat16))


@every_level
def test_int8_weights_are_within_half_a_step(kernels):
    weight = torch.randn(45, 13) * torch.logspace(-6, 6, 45)[:, None]
    step = weight.abs().amax(1, keepdim=True) / 127
    error = INT8.pack(kernels, weight, None, Arena()).unpack() - weight
    assert (error.abs() <= 0.5001 * step).all()


def test_int8_takes_an_output_of_nothing_but_zeros():
    values, scale = quantize(torch.zeros(2, 5))
    assert values.eq(0).all()
    assert scale.isfinite().all()


@every_level
@every_format
def test_selected_outputs_have_the_bits_of_the_whole(kernels, weight_format):
    linear = packed_linear(kernels, torch.randn(100, 30), torch.randn(100), weight_format=weight_format)
    x, outputs = torch.randn(9, 30), torch.randperm(100)[:45]
    assert torch.equal(linear.select(outputs)(x), linear(x)[:, outputs])


@every_level
@every_format
@pytest.mark.parametrize(("scale", "soft_cap"), [(1.0, None), (0.3, None), (1.0, 2.5), (1.7, 30.0)])
def test_head_agrees_with_its_twin(kernels, weight_format, scale, soft_cap):
    linear, x = packed_linear(kernels, torch.randn(50, 24), weight_format=weight_format), torch.randn(9, 24)
    twin = Head(Linear(linear.weight.unpack().float()), scale, soft_cap)
    found = PackedHead(linear, scale, soft_cap)(x)
    # Both sum 24 products of about 1 in fp32, times 1.7 at most, and tanh is within a few roundings.
    torch.testing.assert_close(found, twin(rounded_for(weight_format, x)), atol=5e-5, rtol=0)


@every_level
def test_soft_cap_is_precise_near_zero(kernels):
    x = torch.logspace(-8, 1.5, 200)[:, None]
    head = PackedHead(packed_linear(kernels, torch.tensor([[1.0], [-1.0]]), weight_format=FP32), 1.0, 3.0)
    exact = 3 * torch.tanh(x.double() / 3)
    # 1 - 2 / (e^2x + 1) cancels down to |x| = 0.05, where 2^-24 / 0.05 remain.
    torch.testing.assert_close(head(x).double(), torch.cat([exact, -exact], dim=1), rtol=4e-6, atol=0)


@every_level
@every_format
@pytest.mark.parametrize("scale", [1.0, 6.9375])
def test_embedding_equals_its_twin(kernels, weight_format, scale):
    head = packed_linear(kernels, torch.randn(45, 13), weight_format=weight_format)
    token_ids = torch.tensor([0, 44, 7, 7, 31, 32])
    expected = Embedding(head.weight.unpack().float(), scale)(token_ids)
    assert torch.equal(PackedEmbedding(head, scale)(token_ids), expected)


@every_level
@pytest.mark.parametrize("ids", [torch.arange(40)[::3], torch.arange(9, dtype=torch.int32)], ids=["strided", "int32"])
def test_embedding_takes_ids_in_any_form(kernels, ids):
    weight = torch.randn(45, 14)
    assert torch.equal(PackedEmbedding(packed_linear(kernels, weight, weight_format=FP32))(ids), weight[ids.long()])


@every_level
@settings(max_examples=25)
@given(rows=st.integers(1, 20), width=st.integers(1, 200), seed=st.integers(0, 2**20))
def test_norm_agrees_with_its_twin_whatever_shape_and_strides(kernels, rows, width, seed):
    random = generator(seed)
    weight, x = torch.randn(width, generator=random), strided(rows, width, random)
    exact = RMSNorm(weight.double(), 1e-5)(x.double())
    found = NativeRMSNorm(kernels, weight, 1e-5)(x)
    # The sum of squares errs by width / 16 + 4 roundings at most, its root by half; three more operations follow.
    torch.testing.assert_close(found.double(), exact, rtol=(width / 32 + 8) * ROUNDING, atol=0)


# --- invariance: bits ---------------------------------------------------------------------------


@every_level
@every_format
def test_a_row_has_the_same_bits_among_any_number_of_rows(kernels, weight_format):
    linear = packed_linear(kernels, torch.randn(150, 131), torch.randn(150), weight_format=weight_format)
    x = torch.randn(max(ROW_COUNTS), 131)
    alone = torch.cat([linear(row[None]) for row in x])
    for count in ROW_COUNTS:
        assert torch.equal(linear(x[:count]), alone[:count]), count
        assert torch.equal(linear(x[-count:]), alone[-count:]), count


@every_level
@every_format
def test_a_row_has_the_same_bits_among_more_rows_than_a_tile_finds_in_the_cache(kernels, weight_format):
    linear = packed_linear(kernels, torch.randn(40, 6000), weight_format=weight_format)
    x = torch.randn(100, 6000)
    whole = linear(x)
    for first in (0, 43, 99):
        assert torch.equal(linear(x[first : first + 1]), whole[first : first + 1])


@every_level
@every_format
@pytest.mark.parametrize("inputs", [1024, 2048])
def test_a_row_has_the_same_bits_among_rows_whose_lines_fall_into_the_same_set_of_a_cache(
    kernels, weight_format, inputs
):
    linear = packed_linear(kernels, torch.randn(40, inputs), weight_format=weight_format)
    x = torch.randn(40, inputs)
    alone = torch.cat([linear(row[None]) for row in x])
    for count in (8, 9, 12, 40):
        assert torch.equal(linear(x[:count]), alone[:count]), count


@every_level
@every_format
@pytest.mark.parametrize("num_threads", [2, 3])
def test_a_row_has_the_same_bits_with_any_number_of_threads(kernels, weight_format, num_threads):
    linear, x = packed_linear(kernels, torch.randn(150, 30), weight_format=weight_format), torch.randn(23, 30)
    norm = NativeRMSNorm(kernels, torch.randn(30), 1e-5)
    expected = linear(x), norm(x)
    with threads(kernels, num_threads):
        found = linear(x), norm(x)
    assert all(map(torch.equal, found, expected))


@every_level
def test_a_normed_row_has_the_same_bits_among_any_number_of_rows(kernels):
    norm, x = NativeRMSNorm(kernels, torch.randn(75), 1e-5), torch.randn(40, 75)
    alone = torch.cat([norm(row[None]) for row in x])
    for count in (2, 5, 8, 16, 40):
        assert torch.equal(norm(x[:count]), alone[:count])


@needs_kernels
@every_format
def test_levels_agree(weight_format):
    """Each level rounds in its own way, but all compute the same sum."""
    weight, x = torch.randn(40, 64), torch.randn(7, 64)
    found = [packed_linear(kernels, weight, weight_format=weight_format)(x).numpy() for kernels in KERNELS.values()]
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], atol=1e-4)


# --- what does not fit ----------------------------------------------------------------------------


@every_level
@every_format
@pytest.mark.parametrize("width", [15, 60, 31])
def test_rows_of_another_width_are_refused_though_their_number_divides(kernels, weight_format, width):
    linear, x = packed_linear(kernels, torch.randn(45, 30), weight_format=weight_format), torch.randn(4, width)
    for compute in (linear, lambda x: linear.candidates(x, 1), NativeRMSNorm(kernels, torch.ones(30), 1e-5)):
        with pytest.raises(ValueError, match=f"got rows of {width} values; this layer takes 30"):
            compute(x)
