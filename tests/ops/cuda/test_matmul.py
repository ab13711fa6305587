"""Matrix products on the kernels agree with the formula, and how they are summed is a function of the weight's shape."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.ops.cuda import matmul
from tests.cuda import DEVICE, random

from forerun.ops.cuda.kernels import matmul as kernels  # isort: skip - tests.cuda comes first

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of gates far below 0, which are 0

SHAPES = st.sampled_from([(1, 1), (16, 16), (17, 40), (33, 70)])  # outputs, inputs
ROWS = st.sampled_from([1, 3, 16, 17, 40])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@pytest.fixture(autouse=True, params=[1, 3])
def small_tiles(request, monkeypatch):
    monkeypatch.setattr(kernels, "tiles_of", lambda *_: kernels.Tiles(outputs=16, inputs=16, splits=request.param))


def assert_close(found, expected):
    tolerance = 1e-4 if expected.dtype == torch.float32 else 2**-6
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


few = settings(max_examples=5, deadline=None)


@few
@given(ROWS, SHAPES, DTYPES, DTYPES, st.booleans())
def test_products_agree(num_rows, shape, dtype, output_dtype, has_bias):
    x, weight = random(num_rows, shape[1], dtype=dtype), random(*shape, seed=1, dtype=dtype)
    bias = random(shape[0], seed=2, dtype=dtype) if has_bias else None
    expected, found = (torch.empty(num_rows, shape[0], dtype=output_dtype, device=DEVICE) for _ in range(2))
    matmul.linear(x, weight, expected, bias=bias)
    kernels.linear(x, weight, found, bias=bias)
    assert_close(found, expected)


@few
@given(ROWS, SHAPES, DTYPES, st.sampled_from([1.0, 0.5]))
def test_products_are_added_to_the_stream(num_rows, shape, dtype, scale):
    x, weight = random(num_rows, shape[1], dtype=dtype), random(*shape, seed=1, dtype=dtype)
    expected, found = random(num_rows, shape[0], seed=2), random(num_rows, shape[0], seed=2)
    matmul.add_linear(x, weight, expected, scale=scale)
    kernels.add_linear(x, weight, found, scale=scale)
    assert_close(found, expected)


@few
@given(ROWS, SHAPES, DTYPES, st.sampled_from(["silu", "gelu", "gelu_pytorch_tanh"]))
def test_gated_products_agree(num_rows, shape, dtype, activation):
    num_outputs, num_inputs = shape
    x, weight = random(num_rows, num_inputs, dtype=dtype), random(2 * num_outputs, num_inputs, seed=1, dtype=dtype)
    expected, found = (torch.empty(num_rows, num_outputs, dtype=dtype, device=DEVICE) for _ in range(2))
    matmul.gated_linear(x, weight, expected, activation=activation)
    kernels.gated_linear(x, weight, found, activation=activation)
    assert_close(found, expected)


def test_a_row_alone_has_the_bits_that_it_has_among_others():
    x, weight = random(kernels.FEW_ROWS, 70), random(33, 70, seed=1)
    together = torch.empty(len(x), 33, device=DEVICE)
    kernels.linear(x, weight, together)
    for row in (0, 7, len(x) - 1):
        alone = torch.empty(1, 33, device=DEVICE)
        kernels.linear(x[row : row + 1], weight, alone)
        assert torch.equal(alone[0], together[row])
