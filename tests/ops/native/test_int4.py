"""Weights rounded to int4, with and without offsets: what is stored, what is multiplied, and what is refused."""

import pytest
import torch

from forerun.errors import ConfigError
from forerun.ops.block_rounding import round_to_q4_0, round_to_q4_1, round_to_q8_0
from forerun.ops.native.formats import WEIGHT_FORMATS
from forerun.ops.native.layers import PackedLinear
from forerun.ops.native.memory import Arena
from tests.native import every_level, generator

ROUNDED = {"int4": round_to_q4_1, "int4-symmetric": round_to_q4_0}
every_kind = pytest.mark.parametrize("name", ROUNDED)


@every_level
@every_kind
def test_a_weight_is_kept_with_the_values_it_is_rounded_to(kernels, name):
    weight, importance = torch.randn(40, 96, generator=generator(0)), torch.rand(96, generator=generator(1))
    packed = WEIGHT_FORMATS[name].pack(kernels, weight, None, Arena(), importance)
    assert torch.equal(packed.unpack(), ROUNDED[name](weight, importance).dequantize())


@every_level
@every_kind
def test_a_head_takes_eight_bits(kernels, name):
    weight = torch.randn(40, 96, generator=generator(0))
    packed = WEIGHT_FORMATS[name].pack_head(kernels, weight, Arena())
    assert torch.equal(packed.unpack(), round_to_q8_0(weight).dequantize())


@every_level
@every_kind
def test_rows_are_multiplied_with_these_values(kernels, name):
    weight, bias = torch.randn(40, 96, generator=generator(0)), torch.randn(40, generator=generator(1))
    rows = torch.randn(5, 96, generator=generator(2)).bfloat16().float()
    packed = WEIGHT_FORMATS[name].pack(kernels, weight, bias, Arena())
    expected = rows.double() @ packed.unpack().double().T + bias
    torch.testing.assert_close(PackedLinear(kernels, packed)(rows).double(), expected, rtol=1e-5, atol=1e-4)


@every_level
@pytest.mark.parametrize(("name", "bits"), [("int4", 5), ("int4-symmetric", 4.5)])
def test_a_weight_takes_its_bits_and_a_head_eight_and_a_half(kernels, name, bits):
    weight, row = torch.randn(1024, 2048, generator=generator(0)), WEIGHT_FORMATS[name]
    assert row.pack(kernels, weight, None, Arena()).num_bytes == pytest.approx(weight.numel() * bits / 8, rel=0.01)
    assert row.pack_head(kernels, weight, Arena()).num_bytes == pytest.approx(weight.numel() * 8.5 / 8, rel=0.01)
    assert (row.bytes_per_weight, row.bytes_per_head_weight) == (bits / 8, 8.5 / 8)


@every_level
@every_kind
def test_inputs_that_are_no_whole_blocks_are_refused(kernels, name):
    with pytest.raises(
        ConfigError, match=f"got '{name}', which takes 32 inputs together, .* a weight of 40 inputs; use int8"
    ):
        WEIGHT_FORMATS[name].pack(kernels, torch.zeros(32, 40), None, Arena())
