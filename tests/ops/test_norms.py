"""RMSNorm by its formula."""

import torch

from forerun.ops.layers import RMSNorm


def by_formula(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def test_norm_is_the_formula():
    x, weight = torch.randn(5, 16), torch.randn(16)
    torch.testing.assert_close(RMSNorm(weight, 1e-3)(x), by_formula(x, weight, 1e-3))


def test_each_head_has_its_weight():
    x, weight = torch.randn(5, 3, 16), torch.randn(3, 16)
    torch.testing.assert_close(RMSNorm(weight, 1e-3)(x), by_formula(x, weight, 1e-3))


def test_fp32_weight_of_a_bf16_model_is_not_rounded():
    x = torch.randn(5, 16).bfloat16()
    weight = 1 + torch.randn(16) / 1000
    expected = by_formula(x.float(), weight, 1e-6).bfloat16()
    assert torch.equal(RMSNorm(weight, 1e-6)(x), expected)
