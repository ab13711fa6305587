"""Weights in blocks have the values that the gguf package gives them, to the bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from forerun.ops.block_formats import BLOCK_FORMATS
from forerun.ops.block_weight import BlockWeight

every_block_format = pytest.mark.parametrize("name", BLOCK_FORMATS)


def random_blocks(name, outputs, inputs, seed=0):
    """Blocks of random bytes: every code, any scale, NaN and infinity among them."""
    row = BLOCK_FORMATS[name]
    shape = (outputs, inputs // row.weights * row.bytes)
    data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return BlockWeight(format=name, shape=(outputs, inputs), data=data)


@every_block_format
def test_sizes_are_those_of_gguf(name):
    row = BLOCK_FORMATS[name]
    assert (row.weights, row.bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@every_block_format
def test_any_bytes_have_the_values_that_gguf_gives_them(name):
    weight = random_blocks(name, 300, 512)
    expected = gguf.dequantize(weight.data.numpy(), gguf.GGMLQuantizationType[name])
    found = weight.dequantize().numpy()
    is_nan = np.isnan(expected)
    assert np.array_equal(np.isnan(found), is_nan)
    assert np.array_equal(found.view(np.int32)[~is_nan], expected.view(np.int32)[~is_nan])


@every_block_format
def test_groups_are_as_wide_as_the_format_says(name):
    weight = random_blocks(name, 3, 512)
    groups = weight.groups()
    assert groups.codes.shape == (3, 512)
    assert groups.scale.shape == (3, 512 // BLOCK_FORMATS[name].group)


def test_large_weights_are_dequantized_part_by_part(monkeypatch):
    weight = random_blocks("Q8_0", 10, 64)
    whole = weight.groups().values()
    monkeypatch.setattr("forerun.ops.block_weight.READ_AT_ONCE", 3 * 64)
    assert torch.equal(weight.dequantize().nan_to_num(), whole.nan_to_num())


def test_outputs_can_be_chosen_and_joined():
    weight = random_blocks("Q4_K", 8, 256)
    chosen = torch.tensor([5, 0, 7])
    assert torch.equal(weight[chosen].data, weight.data[chosen])
    assert weight[2:4].data.data_ptr() == weight.data[2:].data_ptr()
    joined = BlockWeight.join([weight[:2], weight[2:]])
    assert joined.shape == weight.shape
    assert torch.equal(joined.data, weight.data)


def test_weights_of_two_formats_cannot_be_joined():
    with pytest.raises(ValueError, match="only weights of one block format"):
        BlockWeight.join([random_blocks("Q4_K", 8, 256), random_blocks("Q6_K", 8, 256)])


def test_data_that_do_not_fit_are_refused():
    data = torch.zeros(4, 18, dtype=torch.uint8)
    with pytest.raises(ValueError, match="must be bytes"):
        BlockWeight(format="Q4_0", shape=(4, 48), data=data)
    with pytest.raises(ValueError, match="must be bytes"):
        BlockWeight(format="Q4_1", shape=(4, 32), data=data)
    with pytest.raises(ValueError, match="got 'Q9'"):
        BlockWeight(format="Q9", shape=(4, 32), data=data)
