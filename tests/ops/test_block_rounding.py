"""Rounding to blocks: never worse than the plain way, and better where the inputs count unequally."""

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import ModelError
from forerun.ops import block_rounding
from forerun.ops.block_rounding import round_to_q4_0, round_to_q4_1, round_to_q8_0
from forerun.ops.block_writing import pack_blocks
from tests.native import generator


def random_weight(seed, outputs=24, inputs=128):
    return torch.randn(outputs, inputs, generator=generator(seed)) * 0.05


def plainly_rounded(weight):
    """Sixteen equal steps from the least weight of each block to the greatest, in fp16 scales and offsets."""
    blocks = weight.view(len(weight), -1, 32)
    low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
    scale, offset = ((high - low) / 15).half().float(), low.half().float()
    return (scale * ((blocks - offset) / scale).round().clamp(0, 15) + offset).view_as(weight)


def block_errors(found, weight, importance=None):
    squares = (found - weight).square() * (1.0 if importance is None else importance)
    return squares.view(len(weight), -1, 32).sum(-1)


@given(st.integers(0, 2**32), st.sampled_from([1e-3, 1.0, 100.0]))
@settings(max_examples=20, deadline=None)
def test_no_block_is_further_off_than_rounded_plainly(seed, size):
    weight = random_weight(seed) * size
    found = block_errors(round_to_q4_1(weight).dequantize(), weight)
    assert (found <= block_errors(plainly_rounded(weight), weight) * (1 + 1e-4)).all()


def test_the_search_is_worth_its_time():
    weight = random_weight(0, outputs=256)
    found = block_errors(round_to_q4_1(weight).dequantize(), weight).sum()
    assert found < 0.87 * block_errors(plainly_rounded(weight), weight).sum()


def test_inputs_that_count_more_are_closer():
    weight = random_weight(1, outputs=256)
    importance = torch.ones(128)
    importance[::16] = 1000.0
    alike, unequal = (round_to_q4_1(weight, given).dequantize() for given in (None, importance))
    errors = [block_errors(found, weight, importance).sum() for found in (alike, unequal)]
    assert errors[1] < 0.3 * errors[0]


def test_an_input_that_was_never_seen_still_counts():
    weight = random_weight(2)
    found = round_to_q4_1(weight, torch.zeros(128)).dequantize()
    assert (found - weight).abs().max() < 0.05


def test_how_much_all_inputs_count_does_not_matter():
    weight, importance = random_weight(3), torch.rand(128, generator=generator(4))
    assert torch.equal(round_to_q4_1(weight, importance).data, round_to_q4_1(weight, importance * 256).data)


@pytest.mark.parametrize("value", [0.0, 0.3, -2.0])
def test_weights_that_are_all_the_same_stay_as_fp16_has_them(value):
    weight = torch.full((2, 64), value)
    assert torch.equal(round_to_q4_1(weight).dequantize(), weight.half().float())


@pytest.mark.parametrize("rounded", [round_to_q4_0, round_to_q4_1])
def test_weights_are_rounded_alike_whatever_lies_beside_them(rounded):
    weight = random_weight(5, outputs=3000)
    whole = rounded(weight)
    assert torch.equal(whole[2900:2910].data, rounded(weight[2900:2910]).data)


@pytest.mark.parametrize("rounded", [round_to_q4_0, round_to_q4_1, round_to_q8_0])
def test_what_is_rounded_of_a_part_is_not_kept_beside_the_whole(rounded, monkeypatch):
    parts = []

    def watched(*args):
        assert not any(part() is not None for part in parts)
        found = pack_blocks(*args)
        parts.append(weakref.ref(found.data))
        return found

    monkeypatch.setattr(block_rounding, "pack_blocks", watched)
    monkeypatch.setattr(block_rounding, "ROUNDED_AT_ONCE", 128)
    rounded(random_weight(7, outputs=3))
    assert len(parts) == 3


def symmetrically_rounded(weight):
    """Steps of an eighth of the weight of the largest magnitude, as llama.cpp rounds to Q4_0."""
    blocks = weight.view(len(weight), -1, 32)
    scale = (blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -8).half().float()
    return (scale * (blocks / scale).round().clamp(-8, 7)).view_as(weight)


@given(st.integers(0, 2**32), st.sampled_from([1e-3, 1.0, 100.0]))
@settings(max_examples=20, deadline=None)
def test_without_offsets_no_block_is_further_off_than_rounded_plainly(seed, size):
    weight = random_weight(seed) * size
    found = block_errors(round_to_q4_0(weight).dequantize(), weight)
    assert (found <= block_errors(symmetrically_rounded(weight), weight) * (1 + 1e-4)).all()


def test_without_offsets_the_search_finds_nearly_what_there_is(monkeypatch):
    weight = random_weight(1, outputs=256)
    found = block_errors(round_to_q4_0(weight).dequantize(), weight).sum()
    assert found < 0.9 * block_errors(symmetrically_rounded(weight), weight).sum()
    monkeypatch.setattr(block_rounding, "TRIED_ENDS", [sign * (6 + i / 20) for i in range(90) for sign in (-1, 1)])
    assert found < 1.005 * block_errors(round_to_q4_0(weight).dequantize(), weight).sum()


def test_without_offsets_inputs_that_count_more_are_closer():
    weight = random_weight(1, outputs=256)
    importance = torch.ones(128)
    importance[::16] = 1000.0
    alike, unequal = (round_to_q4_0(weight, given).dequantize() for given in (None, importance))
    errors = [block_errors(found, weight, importance).sum() for found in (alike, unequal)]
    assert errors[1] < 0.4 * errors[0]


@pytest.mark.parametrize("value", [0.0, 0.5, -2.0])
def test_without_offsets_weights_that_are_all_the_same_stay(value):
    weight = torch.full((2, 64), value)
    assert torch.equal(round_to_q4_0(weight).dequantize(), weight)


@pytest.mark.parametrize("value", [float("nan"), 65600.0])
def test_without_offsets_what_fp16_does_not_hold_is_refused(value):
    with pytest.raises(ModelError, match=r"weights: got .*; must be numbers from -65504 to 65504"):
        round_to_q4_0(torch.full((1, 32), value))


def test_eight_bits_are_half_a_step_off_at_most():
    weight = random_weight(6)
    found = round_to_q8_0(weight)
    steps = found.groups().scale.repeat_interleave(32, dim=1)
    assert ((found.dequantize() - weight).abs() <= 0.52 * steps).all()


@given(
    st.sampled_from([("Q4_0", -8, 7), ("Q4_1", 0, 15), ("Q5_0", -16, 15), ("Q8_0", -128, 127)]), st.integers(0, 2**32)
)
@settings(max_examples=20, deadline=None)
def test_blocks_read_as_they_were_written(written, seed):
    name, low, high = written
    codes = torch.randint(low, high + 1, (3, 2, 32), generator=generator(seed))
    scales, offsets = torch.rand(2, 3, 2, generator=generator(seed)).half()
    groups = pack_blocks(name, codes, scales, offsets if name == "Q4_1" else None).groups()
    assert torch.equal(groups.codes.int(), codes.flatten(1).int())
    assert torch.equal(groups.scale, scales.float())
    assert name != "Q4_1" or torch.equal(groups.offset, offsets.float())
