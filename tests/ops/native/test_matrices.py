"""By AMX an output is, for any number of rows, the same sum in a fixed order."""

from __future__ import annotations

import pytest
import torch

from tests.native import BF16, BF16_CODED, INT8, KERNELS, generator, packed_linear

amx = pytest.mark.skipif("amx" not in KERNELS, reason="this processor has no AMX, or the level is not built")


def defined(rows, weight):
    """Rows [N, inputs] times a weight [outputs, inputs], both of bf16: of each 32 inputs the even and the odd apart, in order."""
    inputs = -(-rows.shape[1] // 32) * 32
    rows, weight = (torch.nn.functional.pad(part.float(), (0, inputs - part.shape[1])) for part in (rows, weight))
    total = torch.zeros(len(rows), len(weight))
    for first in range(0, inputs, 32):
        sums = torch.zeros(2, len(rows), len(weight))
        for pair in range(first, first + 32, 2):
            for odd in (0, 1):  # a product of two bf16 is exact in fp32
                sums[odd] += rows[:, pair + odd, None] * weight[None, :, pair + odd]
        total = total + (sums[0] + sums[1])
    return total


@amx
@pytest.mark.parametrize("weight_format", [BF16, BF16_CODED, INT8], ids=lambda row: row.name)
@pytest.mark.parametrize("inputs", [2, 32, 131, 320])
@pytest.mark.parametrize("num_rows", [1, 2, 15, 16, 17, 32, 33, 70])
def test_a_product_sums_even_and_odd_inputs_apart(weight_format, inputs, num_rows):
    weight = torch.randint(-127, 128, (70, inputs), generator=generator(0)).float()
    if weight_format is not INT8:
        weight = torch.randn(70, inputs, generator=generator(0)).bfloat16().float()
    else:
        weight[:, 0] = 127  # so the scale of each output is one
    rows = torch.randn(num_rows, inputs, generator=generator(1)).bfloat16()
    found = packed_linear(KERNELS["amx"], weight, weight_format=weight_format)(rows.float())
    assert torch.equal(found, defined(rows, weight))


@amx
def test_rows_that_are_not_finite_do_not_touch_others():
    weight = torch.randn(40, 70, generator=generator(0))
    rows = torch.randn(20, 70, generator=generator(1))
    product = packed_linear(KERNELS["amx"], weight, weight_format=BF16)
    alone = product(rows)
    rows[3], rows[19, 69] = float("nan"), float("inf")
    others = [row for row in range(20) if row not in (3, 19)]
    assert torch.equal(product(rows)[others], alone[others])
