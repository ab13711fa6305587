"""The static table of matrix products."""

from __future__ import annotations

import pytest

import tests.cuda  # noqa: F401

from forerun.ops.cuda.kernels.matmul import Tiles, tile_rows_of, tiles_of  # isort: skip - tests.cuda comes first


@pytest.mark.parametrize(
    ("shape", "splits"),
    [((4096, 4096), 4), ((28672, 4096), 1), ((4096, 14336), 4), ((128256, 4096), 1), ((64, 64), 1)],
)
def test_narrow_weights_are_split_along_their_inputs(shape, splits):
    assert tiles_of(*shape).splits == splits


@pytest.mark.parametrize(
    ("num_rows", "num_tiles", "inputs", "tile_rows"),
    [
        *[(1, 448, 128, 16), (16, 448, 128, 16), (17, 448, 128, 32), (32, 448, 128, 32)],
        *[(33, 448, 128, 64), (64, 448, 128, 64), (65, 448, 128, 128), (256, 448, 128, 128)],
        (256, 15, 128, 64),  # so few programs of 128 rows would leave multiprocessors without work
        (256, 448, 1024, 32),  # more do not fit into shared memory
    ],
)
def test_tiles_are_as_high_as_the_rows_fill_where_wide_ones_sum_alike(num_rows, num_tiles, inputs, tile_rows):
    tiles = Tiles(outputs=64, inputs=inputs, splits=1)
    assert tile_rows_of(num_rows, tiles, num_tiles=num_tiles, has_wide_tiles=True) == tile_rows
    assert tile_rows_of(num_rows, tiles, num_tiles=num_tiles, has_wide_tiles=False) == min(32, tile_rows)
