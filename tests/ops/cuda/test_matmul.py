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
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


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
@given(ROWS, SHAPES, DTYPES, st.sampled_from([1.0, 0.5]), st.sampled_from([0.0, 2.0]))
def test_capped_products_agree(num_rows, shape, dtype, factor, cap):
    x, weight = random(num_rows, shape[1], dtype=dtype), random(*shape, seed=1, dtype=dtype)
    expected, found = (torch.empty(num_rows, shape[0], device=DEVICE) for _ in range(2))
    matmul.capped_linear(x, weight, expected, factor=factor, cap=cap)
    kernels.capped_linear(x, weight, found, factor=factor, cap=cap)
    assert_close(found, expected)
    assert not cap or (found.abs() <= cap).all()


@few
@given(ROWS, SHAPES, DTYPES, st.sampled_from(["silu", "gelu", "gelu_pytorch_tanh"]), st.booleans())
def test_gated_products_agree(num_rows, shape, dtype, activation, has_bias):
    num_outputs, num_inputs = shape
    x, weight = random(num_rows, num_inputs, dtype=dtype), random(2 * num_outputs, num_inputs, seed=1, dtype=dtype)
    expected, found = (torch.empty(num_rows, num_outputs, dtype=dtype, device=DEVICE) for _ in range(2))
    bias = random(2 * num_outputs, seed=3) if has_bias else None
    matmul.gated_linear(x, weight, expected, activation=activation, bias=bias)
    kernels.gated_linear(x, weight, found, activation=activation, bias=bias)
    assert_close(found, expected)


def test_more_rows_than_a_launch_takes_are_computed_in_several(monkeypatch):
    x, weight, bias = random(kernels.FEW_ROWS, 70), random(33, 70, seed=1), random(33, seed=2)
    found = [torch.empty(len(x), 33, device=DEVICE) for _ in range(2)]
    kernels.linear(x, weight, found[0], bias=bias)
    monkeypatch.setattr(kernels, "ROWS_PER_LAUNCH", 6)
    kernels.linear(x, weight, found[1], bias=bias)
    assert torch.equal(*found)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_by_formula_too_a_row_alone_has_the_bits_that_it_has_among_others(activation):
    x, gate_up, logits = random(19, 70), random(66, 70, seed=1), random(301, 70, seed=2)
    inner, capped = torch.empty(len(x), 33, device=DEVICE), torch.empty(len(x), 301, device=DEVICE)
    matmul.gated_linear(x, gate_up, inner, activation=activation)
    matmul.capped_linear(x, logits, capped, factor=0.3, cap=1.1)
    for row in range(len(x)):
        inner_alone, capped_alone = torch.empty(1, 33, device=DEVICE), torch.empty(1, 301, device=DEVICE)
        matmul.gated_linear(x[row : row + 1], gate_up, inner_alone, activation=activation)
        matmul.capped_linear(x[row : row + 1], logits, capped_alone, factor=0.3, cap=1.1)
        assert torch.equal(inner_alone[0], inner[row])
        assert torch.equal(capped_alone[0], capped[row])


def test_a_row_alone_has_the_bits_that_it_has_among_others():
    x, weight = random(kernels.FEW_ROWS, 70), random(33, 70, seed=1)
    together = torch.empty(len(x), 33, device=DEVICE)
    kernels.linear(x, weight, together)
    for row in (0, 7, len(x) - 1):
        alone = torch.empty(1, 33, device=DEVICE)
        kernels.linear(x[row : row + 1], weight, alone)
        assert torch.equal(alone[0], together[row])
