"""The torch layers of models by their formulas."""

from __future__ import annotations

import pytest
import torch

from forerun.ops.layers import Embedding, Head, Linear, RMSNorm


def random(*shape):
    """The same values each time for a shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


# --- linear layers and heads ----------------------------------------------------------------------


@pytest.mark.parametrize("bias", [None, torch.tensor([0.5, -2.0])])
def test_linear_is_the_formula(bias):
    x, weight = random(4, 3), random(2, 3)
    expected = torch.stack([weight @ row for row in x]) + (0 if bias is None else bias)
    torch.testing.assert_close(Linear(weight, bias)(x), expected)


def test_head_scales_before_it_caps():
    head = Head(Linear(torch.eye(3)), scale=2.0, soft_cap=5.0)
    x = torch.tensor([[0.1, 1.0, -30.0]])
    torch.testing.assert_close(head(x), 5 * torch.tanh(2 * x / 5))


def test_head_without_scale_and_cap_is_its_linear_layer():
    linear, x = Linear(random(7, 3)), random(2, 3)
    assert torch.equal(Head(linear)(x), linear(x))


def test_logits_are_fp32_whatever_the_weight_is():
    assert Head(Linear(random(7, 3).bfloat16()))(random(2, 3).bfloat16()).dtype == torch.float32


# --- embeddings ------------------------------------------------------------------------------------

TABLE = random(5, 4)
TOKEN_IDS = torch.tensor([3, 0, 3])


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_scale_is_rounded_to_the_tables_dtype(dtype):
    scale = 48**0.5  # 6.9282; 6.9375 in bf16
    found = Embedding(TABLE.bfloat16(), scale, dtype)(TOKEN_IDS)
    wide = TABLE.bfloat16()[TOKEN_IDS].float() * 6.9375
    assert torch.equal(found, wide.to(dtype or torch.bfloat16))


def test_dtype_is_the_tables_unless_asked_for():
    assert Embedding(TABLE.bfloat16())(TOKEN_IDS).dtype == torch.bfloat16
    assert Embedding(TABLE.bfloat16(), dtype=torch.float32)(TOKEN_IDS).dtype == torch.float32


# --- norms -----------------------------------------------------------------------------------------


def by_formula(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def test_norm_is_the_formula():
    x, weight = random(5, 16), random(16)
    torch.testing.assert_close(RMSNorm(weight, 1e-3)(x), by_formula(x, weight, 1e-3))


def test_each_head_has_its_weight():
    x, weight = random(5, 3, 16), random(3, 16)
    torch.testing.assert_close(RMSNorm(weight, 1e-3)(x), by_formula(x, weight, 1e-3))


def test_fp32_weight_of_a_bf16_model_is_not_rounded():
    x = random(5, 16).bfloat16()
    weight = 1 + random(16) / 1000
    expected = by_formula(x.float(), weight, 1e-6).bfloat16()
    assert torch.equal(RMSNorm(weight, 1e-6)(x), expected)
