"""Rounding to four bits by the kernels against its twin in torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import ModelError
from forerun.ops import block_rounding
from forerun.ops.native.rounding import round_to_q4_1
from tests.native import every_level, generator, threads

KINDS = {
    "normal": lambda x, random: x * 0.05,
    "bf16": lambda x, random: (x * 0.05).bfloat16(),
    "so small that scales are subnormal or 0": lambda x, random: x * torch.logspace(-9, -4, x.shape[1]),
    "so large that offsets are hardly fp16": lambda x, random: (x * 3e4).clamp(-65504, 65504),
    "mostly zeros of both signs": lambda x, random: x * (torch.rand(x.shape, generator=random) < 0.05),
    "of few values, so that ties are many": lambda x, random: x.round() / 4,
    "alike": lambda x, random: x[:, :1].expand_as(x),
    "with outliers": lambda x, random: x * (1 + 50 * (torch.rand(x.shape, generator=random) < 0.03)),
}


@every_level
@settings(max_examples=30)
@given(
    kind=st.sampled_from(list(KINDS)),
    outputs=st.integers(1, 50),
    blocks=st.integers(1, 5),
    weighted=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_rounding_has_the_bits_of_its_twin(kernels, kind, outputs, blocks, weighted, seed):
    random = generator(seed)
    weight = KINDS[kind](torch.randn(outputs, 32 * blocks, generator=random), random)
    importance = torch.randn(32 * blocks, generator=random).exp() if weighted else None
    expected = block_rounding.round_to_q4_1(weight, importance)
    found = round_to_q4_1(kernels, weight, importance)
    assert found.shape == expected.shape
    assert torch.equal(found.data, expected.data)


@every_level
def test_neither_threads_nor_parts_change_a_bit(kernels, monkeypatch):
    weight = torch.randn(100, 64, generator=generator(0))
    whole = round_to_q4_1(kernels, weight).data
    monkeypatch.setattr(block_rounding, "ROUNDED_AT_ONCE", 7 * 64)
    with threads(kernels, 3):
        assert torch.equal(round_to_q4_1(kernels, weight).data, whole)


@every_level
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 65600.0])
def test_what_is_no_number_that_fp16_holds_is_refused(kernels, value):
    weight = torch.randn(5, 64, generator=generator(0))
    weight[3, 40] = value
    with pytest.raises(ModelError, match=r"weights: got .*; must be numbers from -65504 to 65504"):
        round_to_q4_1(kernels, weight)


@every_level
def test_inputs_that_are_no_whole_blocks_are_refused(kernels):
    weight, shares = torch.zeros(2, 40), torch.zeros(40)
    with pytest.raises(ValueError, match="round_blocks: the inputs are not whole blocks"):
        kernels.round_blocks(weight.data_ptr(), shares.data_ptr(), 2, 40, weight.data_ptr())
