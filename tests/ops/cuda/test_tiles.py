"""The static table of matrix products."""

from __future__ import annotations

import pytest
import torch

from tests.cuda import DEVICE

from forerun.ops.cuda.kernels import matmul as kernels  # isort: skip - tests.cuda comes first
from forerun.ops.cuda.kernels.matmul import Tiles, WideTiles, tile_rows_of, tiles_of  # isort: skip


@pytest.mark.parametrize(
    ("shape", "splits"),
    [((4096, 4096), 4), ((28672, 4096), 1), ((4096, 14336), 4), ((128256, 4096), 1), ((64, 64), 1)],
)
def test_narrow_weights_are_split_along_their_inputs(shape, splits):
    assert tiles_of(*shape).splits == splits


@pytest.mark.parametrize(
    ("num_rows", "num_tiles", "inputs", "tile_rows"),
    [
        *[(1, 448, 64, 16), (16, 448, 64, 16), (17, 448, 64, 32), (32, 448, 64, 32)],
        *[(33, 448, 64, 64), (64, 448, 64, 64), (65, 448, 64, 128), (256, 448, 64, 128)],
        (256, 15, 64, 64),  # so few programs of 128 rows would leave multiprocessors without work
        (256, 448, 128, 64),  # more do not fit into shared memory
        (256, 448, 256, 32),
    ],
)
def test_tiles_are_as_high_as_the_rows_fill_where_wide_ones_sum_alike(num_rows, num_tiles, inputs, tile_rows):
    tiles = Tiles(outputs=64, inputs=inputs, splits=1)
    for most in (32, 64, 128):
        found = tile_rows_of(num_rows, tiles, num_tiles=num_tiles, wide=WideTiles(most, 227 << 10))
        assert found == min(most, tile_rows)


@pytest.mark.parametrize(
    ("other_from", "shared_kib", "highest"), [(None, 227, 128), (None, 99, 64), (64, 227, 32), (128, 227, 64)]
)
def test_tiles_are_no_higher_than_bits_and_shared_memory_allow(monkeypatch, other_from, shared_kib, highest):
    """`other_from`: the height from which on the hardware is made to sum otherwise."""
    multiply = kernels._multiply_in_tiles

    def multiply_as_hardware(x, weight, parts, tiles, tile_rows):
        multiply(x, weight, parts, tiles, tile_rows)
        if other_from is not None and tile_rows >= other_from:
            parts[0, 17, 5] *= 1 + 2**-20

    monkeypatch.setattr(kernels, "_multiply_in_tiles", multiply_as_hardware)
    assert kernels._highest_alike(DEVICE, torch.bfloat16, shared_kib << 10) == highest
