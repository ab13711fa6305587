"""Products by torch are those of the formula within rounding, whatever follows the sum."""

from __future__ import annotations

import pytest
import torch

from forerun.ops.cuda import matmul, torch_matmul
from tests.cuda import DEVICE, random

DTYPES = [torch.float32, torch.bfloat16]


def assert_close(found, expected, dtype):
    tolerance = 1e-4 if dtype == torch.float32 else 2**-5
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("output_dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_agree(dtype, output_dtype, has_bias):
    x, weight = random(3, 40, dtype=dtype), random(17, 40, seed=1, dtype=dtype)
    bias = random(17, seed=2) if has_bias else None
    expected, found = (torch.empty(3, 17, dtype=output_dtype, device=DEVICE) for _ in range(2))
    matmul.linear(x, weight, expected, bias=bias)
    torch_matmul.linear(x, weight, found, bias=bias)
    assert_close(found, expected, dtype if output_dtype == torch.float32 else output_dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("factor", "cap"), [(1.0, 0.0), (0.5, 0.0), (1.0, 2.0), (0.5, 2.0)])
def test_capped_products_agree(dtype, factor, cap):
    x, weight = random(3, 40, dtype=dtype), random(17, 40, seed=1, dtype=dtype)
    expected, found = (torch.empty(3, 17, device=DEVICE) for _ in range(2))
    matmul.capped_linear(x, weight, expected, factor=factor, cap=cap)
    torch_matmul.capped_linear(x, weight, found, factor=factor, cap=cap)
    assert_close(found, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_added_to_the_stream(dtype, has_bias):
    x, weight = random(3, 40, dtype=dtype), random(17, 40, seed=1, dtype=dtype)
    bias = random(17, seed=3) if has_bias else None
    expected, found = random(3, 17, seed=2), random(3, 17, seed=2)
    matmul.add_linear(x, weight, expected, bias=bias, scale=0.5)
    torch_matmul.add_linear(x, weight, found, bias=bias, scale=0.5)
    assert_close(found, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_gated_products_agree(dtype, activation):
    x, gate_up = random(3, 40, dtype=dtype), random(34, 40, seed=1, dtype=dtype)
    bias = random(34, seed=3)
    expected, found = (torch.empty(3, 17, dtype=dtype, device=DEVICE) for _ in range(2))
    matmul.gated_linear(x, gate_up, expected, activation=activation, bias=bias)
    torch_matmul.gated_linear(x, gate_up, found, activation=activation, bias=bias)
    assert_close(found, expected, dtype)
