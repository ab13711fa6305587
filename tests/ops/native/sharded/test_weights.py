"""A rank's outputs of a packed weight are the whole weight's outputs, to the bit, in every format."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import ModelError
from forerun.ops.block_weight import BlockWeight
from forerun.ops.native.formats.blocks import BLOCK_TILES
from forerun.ops.native.formats.joined import JOINED
from forerun.ops.native.layers import PackedLinear
from forerun.ops.native.memory import Arena
from forerun.ops.native.sharded.weights import take_outputs, take_tiles
from forerun.ops.native.structs import TILE
from tests.native import BF16, BF16_CODED, INT8, KERNELS, every_format, generator, needs_kernels

pytestmark = needs_kernels
OUTPUTS, INPUTS = 150, 64  # four tiles and a part


def kernels():
    return next(iter(KERNELS.values()))


def packed(weight_format, *, outputs=OUTPUTS, seed=0):
    source = generator(seed)
    weight, bias = torch.randn(outputs, INPUTS, generator=source), torch.randn(outputs, generator=source)
    weight[3, 5] = 1e-30  # coded bf16 has no code for it
    return weight_format.pack(kernels(), weight, bias, Arena())


def results(weight):
    return PackedLinear(kernels(), weight)(torch.randn(3, INPUTS, generator=generator(9)))


def chosen(whole, ranges):
    return torch.cat([whole[:, part.start : part.stop] for part in ranges], dim=1)


@every_format
@settings(max_examples=20, deadline=None)
@given(bounds=st.lists(st.integers(0, OUTPUTS), min_size=2, max_size=6, unique=True).map(sorted))
def test_any_outputs_of_a_weight_give_the_bits_of_the_whole(weight_format, bounds):
    whole = packed(weight_format)
    ranges = [range(first, last) for first, last in zip(bounds[::2], bounds[1::2], strict=False)]
    part = take_outputs(kernels(), whole, ranges, Arena())
    assert part.outputs == sum(map(len, ranges))
    assert torch.equal(results(part), chosen(results(whole), ranges))


@every_format
@settings(max_examples=20, deadline=None)
@given(bounds=st.lists(st.integers(0, 5), min_size=2, max_size=4, unique=True).map(sorted))
def test_whole_tiles_are_copied_as_they_lie(weight_format, bounds):
    whole = packed(weight_format)
    tiles = [range(first, last) for first, last in zip(bounds[::2], bounds[1::2], strict=False)]
    part = take_tiles(whole, tiles, Arena())
    assert torch.equal(part.data, torch.cat([whole.data[one.start : one.stop] for one in tiles]))
    assert part.data.data_ptr() != whole.data.data_ptr()
    outputs = [range(one.start * TILE, min(one.stop * TILE, OUTPUTS)) for one in tiles]
    assert torch.equal(results(part), chosen(results(whole), outputs))


@pytest.mark.parametrize("weight_format", [BF16_CODED, INT8, BF16], ids=lambda row: row.name)
def test_a_rank_may_have_no_tile_at_all(weight_format):
    part = take_tiles(packed(weight_format), [range(2, 2)], Arena())
    assert (part.outputs, part.struct.outputs, len(part.data)) == (0, 0, 0)


def blocks(name, outputs, seed):
    """Random codes of Q8_0 or Q4_0, whose scales are 1."""
    size = {"Q8_0": 34, "Q4_0": 18}[name]
    data = torch.randint(0, 256, [outputs, INPUTS // 32, size], dtype=torch.uint8, generator=generator(seed))
    data[..., :2] = torch.tensor([0x00, 0x3C], dtype=torch.uint8)
    return BLOCK_TILES[name].pack(
        kernels(), BlockWeight(format=name, shape=(outputs, INPUTS), data=data.flatten(1)), None, Arena()
    )


@pytest.mark.parametrize("ranges", [[range(64)], [range(32, 96)], [range(7, 50)]], ids=str)
def test_blocks_are_taken_as_they_are(ranges):
    whole = blocks("Q4_0", 96, seed=1)
    assert torch.equal(results(take_outputs(kernels(), whole, ranges, Arena())), chosen(results(whole), ranges))


def test_of_a_joined_weight_each_part_is_taken():
    whole = JOINED.join([blocks("Q8_0", 96, seed=1), blocks("Q4_0", 64, seed=2), blocks("Q8_0", 64, seed=3)])
    ranges = [range(32, 96), range(128, 160), range(192, 224)]
    part = take_outputs(kernels(), whole, ranges, Arena())
    assert torch.equal(results(part), chosen(results(whole), ranges))


def test_of_a_joined_weight_no_part_but_the_last_may_end_within_a_tile():
    whole = JOINED.join([blocks("Q8_0", 96, seed=1), blocks("Q4_0", 64, seed=2)])
    with pytest.raises(ModelError, match="40 outputs of a weight in several block formats; must be a multiple of 32"):
        take_outputs(kernels(), whole, [range(40), range(96, 128)], Arena())
