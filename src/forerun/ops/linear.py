"""Matrix products with stored weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Linear:
    """x @ weight.T + bias, with weight [out, in] and bias [out] or None."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        return F.linear(x, self.weight, self.bias)
