"""What `forerun tune-kernels` asks of a cut before it takes it: a row's bits. Its times need a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.cuda import DEVICE

from forerun.ops.cuda.kernels import matmul, meter  # isort: skip - tests.cuda comes first
from forerun.ops.cuda.kernels.meter import CudaMeter  # isort: skip
from forerun.ops.cuda.tiles import Tiles, tiles_of  # isort: skip

SHAPE = (32, 64)
TILES = Tiles(outputs=16, inputs=16, splits=2)


@pytest.fixture(autouse=True)
def few_weights(monkeypatch):
    """Bits are asked of one matrix; only what is timed needs so many that none stays in a cache."""
    monkeypatch.setattr(meter, "LEAST_BYTES", 0)


def test_a_cut_by_the_weights_shape_keeps_a_rows_bits():
    before = tiles_of(*SHAPE)
    assert CudaMeter(DEVICE).keeps_bits(SHAPE, TILES)
    assert tiles_of(*SHAPE) == before


def test_a_product_that_hangs_on_the_number_of_rows_is_found(monkeypatch):
    linear = matmul.linear

    def hanging(x, weight, output):
        linear(x, weight, output)
        if len(x) == 33:
            output[7, 5] = torch.nextafter(output[7, 5], output[7, 5] + 1)

    monkeypatch.setattr(matmul, "linear", hanging)
    assert not CudaMeter(DEVICE).keeps_bits(SHAPE, TILES)
