"""Matrix products with stored weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Linear:
    """x @ weight.T + bias, with weight [out, in] and bias [out] or None."""

    weight: Tensor
    bias: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that a pass reads."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        return F.linear(x, self.weight, self.bias)

    def rows(self, outputs: Tensor) -> Tensor:
        """The weights of some outputs: [n] int64 -> [n, in]"""
        return self.weight[outputs]


@dataclass(frozen=True, slots=True)
class Head:
    """Logits: a linear layer, then `scale`, then soft_cap * tanh(logits / soft_cap) where there is a cap."""

    linear: Linear
    scale: float = 1.0
    soft_cap: float | None = None

    def __call__(self, normed: Tensor) -> Tensor:
        """[R, hidden_size] -> [R, vocab_size] fp32"""
        logits = self.linear(normed).float()
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)
