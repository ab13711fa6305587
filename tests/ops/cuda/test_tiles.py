"""The static table of matrix products."""

from __future__ import annotations

import pytest

import tests.cuda  # noqa: F401

from forerun.ops.cuda.kernels.matmul import Tiles, WideTiles, tile_rows_of, tiles_of  # isort: skip - tests.cuda comes first


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
