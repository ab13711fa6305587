"""Products with weights in blocks against their values in fp64, and that a row's result is its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.ops.block_formats import BLOCK_FORMATS
from forerun.ops.block_weight import BlockWeight, GatedWeight, interleaved, join_weights
from forerun.ops.native.formats import blocks as blocks_module
from forerun.ops.native.formats.base import read_outputs
from forerun.ops.native.formats.blocks import BLOCK_TILES
from forerun.ops.native.layers import PackedHead
from tests.block_products import assert_within_rounding, packed
from tests.blocks import every_block_format, random_blocks, tame_blocks
from tests.native import KERNELS, every_level, generator, needs_kernels, threads


def same_bits(found, expected):
    """Equal, of NaNs whatever their bits."""
    return torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.nan_to_num(), expected.nan_to_num())


@every_level
@every_block_format
def test_packing_keeps_every_value(kernels, name):
    weight = random_blocks(name, 70, 512)
    linear = packed(kernels, weight)
    assert same_bits(linear.weight.unpack(), weight.dequantize())
    assert same_bits(linear.rows(torch.arange(70)), weight.dequantize())


@every_level
@every_block_format
@pytest.mark.parametrize("num_gates", [5, 16, 70])
def test_gates_and_ups_are_packed_as_if_they_lay_in_turns(kernels, name, num_gates):
    gates, ups = random_blocks(name, num_gates, 512, seed=1), random_blocks(name, num_gates, 512, seed=2)
    in_turns = interleaved(gates.data, ups.data)
    expected = BlockWeight(format=name, shape=(len(in_turns), 512), data=in_turns)
    found, weight = packed(kernels, GatedWeight(gates, ups)).weight, GatedWeight(gates, ups)
    assert weight.shape == expected.shape == (found.outputs, found.inputs)
    assert same_bits(found.unpack(), expected.dequantize())
    assert same_bits(found.unpack(), weight.dequantize())


def test_gates_and_ups_of_a_mapped_file_are_let_go_of_as_they_are_packed(monkeypatch):
    parts, forgotten = [tame_blocks("Q4_K", 40, 256, seed) for seed in (1, 2)], ([], [])
    mapped = [
        replace(part, forget=lambda begin, end, places=places: places.append((begin, end)))
        for part, places in zip(parts, forgotten, strict=True)
    ]
    monkeypatch.setattr(blocks_module, "PACKED_AT_ONCE", 1)
    for kernels in KERNELS.values():
        for places in forgotten:
            places.clear()
        assert torch.equal(
            packed(kernels, GatedWeight(*mapped)).weight.data, packed(kernels, GatedWeight(*parts)).weight.data
        )
        row = parts[0].data.shape[1]
        assert forgotten == ([(0, 16 * row), (16 * row, 32 * row), (32 * row, 40 * row)],) * 2


@every_block_format
def test_a_weight_takes_hardly_more_memory_than_in_its_file(name):
    weight = tame_blocks(name, 64, 1024)
    for kernels in KERNELS.values():
        assert packed(kernels, weight).num_bytes <= 1.06 * weight.nbytes


@every_level
@every_block_format
@settings(max_examples=8)
@given(
    rows=st.integers(1, 40),
    blocks=st.integers(1, 3),
    outputs=st.integers(1, 100),
    with_bias=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_linear_agrees_with_its_twin(kernels, name, rows, blocks, outputs, with_bias, seed):
    random = generator(seed)
    weight = tame_blocks(name, outputs, blocks * max(32, BLOCK_FORMATS[name].weights), seed)
    bias = torch.randn(outputs, generator=random) if with_bias else None
    x = torch.randn(rows, weight.shape[1], generator=random)
    assert_within_rounding(packed(kernels, weight, bias)(x), weight, bias, x.bfloat16())


@every_level
@every_block_format
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it_and_threads_compute(kernels, name):
    linear = packed(kernels, tame_blocks(name, 70, 512))
    x = torch.randn(60, 512, generator=generator(1))
    whole = linear(x)
    for count in (1, 2, 3, 4, 5, 7, 8, 12, 13, 24, 25, 37):
        for first in (0, 17):
            assert torch.equal(linear(x[first : first + count]), whole[first : first + count])
    with threads(kernels, 3):
        assert torch.equal(linear(x), whole)


@every_level
@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("inputs", [1024, 2048])
def test_a_row_has_the_same_bits_among_rows_whose_lines_fall_into_the_same_set_of_a_cache(kernels, name, inputs):
    linear = packed(kernels, tame_blocks(name, 40, inputs))
    x = torch.randn(40, inputs, generator=generator(1))
    alone = torch.cat([linear(row[None]) for row in x])
    for count in (8, 9, 12, 40):
        assert torch.equal(linear(x[:count]), alone[:count]), count


@every_level
@every_block_format
def test_the_smallest_rows_have_the_same_bits_whatever_rows_are_beside_them(kernels, name):
    weight = tame_blocks(name, 40, 512)
    x = torch.randint(1, 1 << 15, (9, 512), dtype=torch.int32, generator=generator(2)).to(torch.int16)
    x = (
        (x % 512).view(torch.bfloat16).float()
    )  # from the smallest number of bf16 to eight times the smallest normal one
    linear = packed(kernels, weight)
    whole = linear(x)
    assert whole.abs().max() > 0
    for count in (1, 2, 3):
        assert torch.equal(linear(x[:count]), whole[:count])


@every_level
@every_block_format
@pytest.mark.parametrize("exponent", [-101, -100, -99, 120])
def test_one_row_has_the_bits_that_it_has_among_others_however_small_or_large(kernels, name, exponent):
    weight = tame_blocks(name, 40, 512)
    x = torch.randn(5, 512, generator=generator(exponent)).bfloat16()
    x = torch.where(x.abs() < 1, x.sign(), x).float() * 2.0**exponent  # multiples of the smallest
    x[:, 7] = 0.0
    linear = packed(kernels, weight)
    whole = linear(x)
    for row in range(5):
        assert same_bits(linear(x[row : row + 1]), whole[row : row + 1])


@every_level
@every_block_format
@pytest.mark.parametrize("row_bits", [0, 8, 16])
def test_no_rows_give_nothing_and_many_have_the_bits_of_one(kernels, name, row_bits):
    linear = packed(kernels, tame_blocks(name, 40, 256), row_bits=row_bits)
    x = torch.randn(300, 256, generator=generator(3))
    whole = linear(x)
    for first in (0, 127, 128, 299):
        assert torch.equal(linear(x[first : first + 1]), whole[first : first + 1])
    assert linear(x[:0]).shape == (0, 40)


@every_level
def test_weights_of_several_formats_are_one_product(kernels):
    weight = join_weights(
        [tame_blocks("Q4_K", 64, 256), tame_blocks("Q6_K", 32, 256, seed=1), tame_blocks("Q8_0", 5, 256)]
    )
    linear = packed(kernels, weight, torch.arange(101.0))
    x = torch.randn(30, 256, generator=generator(0))
    whole = linear(x)
    assert_within_rounding(whole, weight, torch.arange(101.0), x.bfloat16())
    assert torch.equal(linear(x[3:5]), whole[3:5])
    assert torch.equal(
        linear.rows(torch.tensor([0, 63, 64, 95, 96, 100])), weight.dequantize()[[0, 63, 64, 95, 96, 100]]
    )


@every_level
def test_blocks_and_dense_weights_are_one_product(kernels):
    dense = torch.randn(32, 256, generator=generator(0)).bfloat16()
    weight = join_weights([dense, tame_blocks("Q4_0", 40, 256)])
    linear = packed(kernels, weight)
    assert linear.weight.num_bytes < 2 * 32 * 256 + 64 * 256
    assert torch.equal(linear.weight.unpack(), weight.dequantize())


@every_level
def test_parts_that_share_a_tile_are_brought_to_one_format(kernels):
    weight = join_weights([tame_blocks("Q4_K", 40, 256), tame_blocks("Q6_K", 7, 256)])
    linear = packed(kernels, weight)
    assert linear.weight.format is BLOCK_TILES["GROUPS16"]
    assert torch.equal(linear.weight.unpack(), weight.dequantize())


@every_level
@every_block_format
def test_chosen_outputs_have_their_weights(kernels, name):
    weight = tame_blocks(name, 70, 256)
    chosen = torch.tensor([69, 0, 17, 40, *range(33)])
    linear = packed(kernels, weight, torch.arange(70.0)).select(chosen)
    x = torch.randn(3, 256, generator=generator(0))
    assert torch.equal(linear.weight.unpack(), weight.dequantize()[chosen])
    assert torch.equal(linear(x), packed(kernels, weight, torch.arange(70.0))(x)[:, chosen])


@every_level
def test_a_head_in_blocks_finds_candidates(kernels):
    head = PackedHead(packed(kernels, tame_blocks("Q6_K", 300, 256)))
    x = torch.randn(5, 256, generator=generator(0))
    logits, candidates = head.with_candidates(x, 3)
    assert torch.equal(candidates.logits, logits.topk(3).values)


@every_level
def test_a_weight_is_packed_part_by_part_and_each_part_forgotten(kernels, monkeypatch):
    weight, forgotten = tame_blocks("Q4_K", 70, 256), []
    expected = packed(kernels, weight).weight.data
    monkeypatch.setattr(blocks_module, "PACKED_AT_ONCE", 1)
    found = packed(kernels, replace(weight, forget=lambda begin, end: forgotten.append((begin, end)))).weight.data
    assert torch.equal(found, expected)
    row = weight.data.shape[1]
    assert forgotten == [(0, 32 * row), (32 * row, 64 * row), (64 * row, 70 * row)]


@needs_kernels
def test_what_does_not_fit_is_refused():
    kernels = next(iter(KERNELS.values()))
    data = torch.zeros(1 << 12, dtype=torch.uint8)
    with pytest.raises(ValueError, match="format is unknown"):
        kernels.pack_blocks(99, data.data_ptr(), None, 1, 256, 1024, data.data_ptr())
    with pytest.raises(ValueError, match="not whole blocks"):
        kernels.pack_blocks(BLOCK_TILES["Q4_K"].kernel_id, data.data_ptr(), None, 1, 128, 1024, data.data_ptr())
    with pytest.raises(ValueError, match="another size"):
        kernels.pack_blocks(BLOCK_TILES["Q4_K"].kernel_id, data.data_ptr(), None, 1, 256, 1024, data.data_ptr())


def test_reading_outputs_needs_no_padding():
    for kernels in KERNELS.values():
        weight = tame_blocks("Q4_1", 33, 64)
        found = read_outputs(kernels, packed(kernels, weight).weight, torch.tensor([32]), scale=2.0)
        assert torch.equal(found, 2 * weight.dequantize()[32:])
