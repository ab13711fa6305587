"""Weights in blocks have the values that the gguf package gives them, to the bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from forerun.ops.block_formats import BLOCK_FORMATS
from forerun.ops.block_weight import BlockLinear, BlockWeight, JoinedWeight, interleaved, join_weights
from tests.blocks import every_block_format, random_blocks, tame_blocks

every_gguf_format = pytest.mark.parametrize("name", [name for name in BLOCK_FORMATS if name != "GROUPS16"])


@every_gguf_format
def test_sizes_are_those_of_gguf(name):
    row = BLOCK_FORMATS[name]
    assert (row.weights, row.bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@every_gguf_format
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
    joined = join_weights([weight[:2], weight[2:]])
    assert joined.shape == weight.shape
    assert torch.equal(joined.data, weight.data)


@every_block_format
def test_groups_of_sixteen_hold_every_format_exactly(name):
    weight = tame_blocks(name, 5, 512)
    assert torch.equal(weight.as_groups16().dequantize(), weight.dequantize())


def test_weights_of_several_formats_are_joined_as_they_are():
    parts = [tame_blocks("Q4_K", 8, 256), torch.randn(3, 256), tame_blocks("Q6_K", 5, 256)]
    joined = join_weights(parts)
    assert isinstance(joined, JoinedWeight)
    assert joined.shape == (16, 256)
    assert torch.equal(joined.dequantize(), torch.cat([parts[0].dequantize(), parts[1], parts[2].dequantize()]))


def test_gates_and_ups_lie_in_turns_of_sixteen_and_zeros_fill_the_last():
    gates, ups = torch.arange(1, 19), torch.arange(101, 119)
    found = interleaved(gates, ups).tolist()
    assert found == [*range(1, 17), *range(101, 117), 17, 18, *[0] * 14, 117, 118, *[0] * 14]


def test_joined_blocks_become_one_format_without_loss():
    joined = join_weights([tame_blocks("Q4_K", 8, 256), tame_blocks("Q6_K", 5, 256)])
    assert torch.equal(joined.in_one_format().dequantize(), joined.dequantize())


def test_a_linear_layer_on_blocks_is_one_on_their_values():
    weight, bias = tame_blocks("Q4_K", 8, 256), torch.randn(8)
    x = torch.randn(3, 256)
    assert torch.equal(BlockLinear(weight, bias)(x), torch.nn.functional.linear(x, weight.dequantize(), bias))


def test_data_that_do_not_fit_are_refused():
    data = torch.zeros(4, 18, dtype=torch.uint8)
    with pytest.raises(ValueError, match="must be bytes"):
        BlockWeight(format="Q4_0", shape=(4, 48), data=data)
    with pytest.raises(ValueError, match="must be bytes"):
        BlockWeight(format="Q4_1", shape=(4, 32), data=data)
    with pytest.raises(ValueError, match="got 'Q9'"):
        BlockWeight(format="Q9", shape=(4, 32), data=data)
