"""Weights rounded to int4: what is stored, what is multiplied, and what is refused."""

import pytest
import torch

from forerun.errors import ConfigError
from forerun.ops.block_rounding import round_to_q4_1, round_to_q8_0
from forerun.ops.native.formats import WEIGHT_FORMATS
from forerun.ops.native.layers import PackedLinear
from forerun.ops.native.memory import Arena
from tests.native import every_level, generator

INT4 = WEIGHT_FORMATS["int4"]


@every_level
def test_a_weight_is_kept_with_the_values_it_is_rounded_to(kernels):
    weight, importance = torch.randn(40, 96, generator=generator(0)), torch.rand(96, generator=generator(1))
    packed = INT4.pack(kernels, weight, None, Arena(), importance)
    assert torch.equal(packed.unpack(), round_to_q4_1(weight, importance).dequantize())


@every_level
def test_a_head_takes_eight_bits(kernels):
    weight = torch.randn(40, 96, generator=generator(0))
    assert torch.equal(INT4.pack_head(kernels, weight, Arena()).unpack(), round_to_q8_0(weight).dequantize())


@every_level
def test_rows_are_multiplied_with_these_values(kernels):
    weight, bias = torch.randn(40, 96, generator=generator(0)), torch.randn(40, generator=generator(1))
    rows = torch.randn(5, 96, generator=generator(2)).bfloat16().float()
    packed = INT4.pack(kernels, weight, bias, Arena())
    expected = rows.double() @ packed.unpack().double().T + bias
    torch.testing.assert_close(PackedLinear(kernels, packed)(rows).double(), expected, rtol=1e-5, atol=1e-4)


@every_level
def test_a_weight_takes_five_bits_and_a_head_eight_and_a_half(kernels):
    weight = torch.randn(1024, 2048, generator=generator(0))
    assert INT4.pack(kernels, weight, None, Arena()).num_bytes == pytest.approx(weight.numel() * 5 / 8, rel=0.01)
    assert INT4.pack_head(kernels, weight, Arena()).num_bytes == pytest.approx(weight.numel() * 8.5 / 8, rel=0.01)


@every_level
def test_inputs_that_are_no_whole_blocks_are_refused(kernels):
    with pytest.raises(
        ConfigError, match="takes 32 inputs together, but the model has a weight of 40 inputs; use int8"
    ):
        INT4.pack(kernels, torch.zeros(32, 40), None, Arena())
