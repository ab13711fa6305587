"""Linear and head by their formulas."""

import pytest
import torch

from forerun.ops.layers import Head, Linear


@pytest.mark.parametrize("bias", [None, torch.tensor([0.5, -2.0])])
def test_linear_is_the_formula(bias):
    x, weight = torch.randn(4, 3), torch.randn(2, 3)
    expected = torch.stack([weight @ row for row in x]) + (0 if bias is None else bias)
    torch.testing.assert_close(Linear(weight, bias)(x), expected)


def test_head_scales_before_it_caps():
    head = Head(Linear(torch.eye(3)), scale=2.0, soft_cap=5.0)
    x = torch.tensor([[0.1, 1.0, -30.0]])
    torch.testing.assert_close(head(x), 5 * torch.tanh(2 * x / 5))


def test_head_without_scale_and_cap_is_its_linear_layer():
    linear, x = Linear(torch.randn(7, 3)), torch.randn(2, 3)
    assert torch.equal(Head(linear)(x), linear(x))


def test_logits_are_fp32_whatever_the_weight_is():
    assert Head(Linear(torch.randn(7, 3).bfloat16()))(torch.randn(2, 3).bfloat16()).dtype == torch.float32
