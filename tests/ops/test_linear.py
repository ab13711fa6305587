"""Linear by its formula."""

import pytest
import torch

from forerun.ops.linear import Linear


@pytest.mark.parametrize("bias", [None, torch.tensor([0.5, -2.0])])
def test_linear_is_the_formula(bias):
    x, weight = torch.randn(4, 3), torch.randn(2, 3)
    expected = torch.stack([weight @ row for row in x]) + (0 if bias is None else bias)
    torch.testing.assert_close(Linear(weight, bias)(x), expected)
