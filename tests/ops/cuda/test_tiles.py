"""The static table of matrix products."""

from __future__ import annotations

import pytest

import tests.cuda  # noqa: F401

from forerun.ops.cuda.kernels.matmul import tiles_of  # isort: skip - tests.cuda comes first


@pytest.mark.parametrize(
    ("shape", "splits"),
    [((4096, 4096), 4), ((28672, 4096), 1), ((4096, 14336), 4), ((128256, 4096), 1), ((64, 64), 1)],
)
def test_narrow_weights_are_split_along_their_inputs(shape, splits):
    assert tiles_of(*shape).splits == splits
