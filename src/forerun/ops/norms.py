"""Root-mean-square normalisation (RMSNorm, arXiv 1910.07467)."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """x / rms(x) * weight over the last dimension.

    `weight` is [width], or [num_heads, width] for a weight per head of x [T, num_heads, width]. It
    may be of higher precision than x: the norm is then computed in the weight's and rounded once.
    """

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Same shape and dtype as x."""
        weight = self.weight
        wide = x.to(weight.dtype)
        if weight.ndim == 1:
            return F.rms_norm(wide, weight.shape, weight, self.eps).to(x.dtype)
        return (F.rms_norm(wide, weight.shape[-1:], None, self.eps) * weight).to(x.dtype)
