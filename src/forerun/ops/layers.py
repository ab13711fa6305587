"""The torch layers of models: matrix products, embeddings, norms and activation functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.batch import Candidates
from forerun.ops.candidates import find_candidates

Activation = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh"),
}
"""Activation functions of gated MLPs, by the names that model configurations use."""

SWIGLU_OAI = "swiglu_oai"
SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702


def swiglu_oai(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss's gating (arXiv 2508.10925): the gate is held below a limit, the up on both sides, and one is added to it."""
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)


def _activated(activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
    return activation(gate) * up


Gating = Callable[[Tensor, Tensor], Tensor]
"""Makes of gates and their ups what the last product of a gated MLP reads."""

GATINGS: dict[str, Gating] = {name: functools.partial(_activated, one) for name, one in ACTIVATIONS.items()} | {
    SWIGLU_OAI: swiglu_oai
}
"""By the names of activations, which multiply the up, and of what is more than that."""


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


class HeadProduct(Protocol):
    """The product of a head, of whose weights drafters may ask for some; a `Linear` is one."""

    @property
    def num_bytes(self) -> int:
        """Bytes that a pass reads."""
        ...

    def __call__(self, x: Tensor, /) -> Tensor:
        """[R, in] -> [R, vocab_size]"""
        ...

    def rows(self, outputs: Tensor) -> Tensor:
        """The weights of some outputs: [n] int64 -> [n, in]"""
        ...


@dataclass(frozen=True, slots=True)
class Head:
    """Logits: a product, then `scale`, then soft_cap * tanh(logits / soft_cap) where there is a cap."""

    linear: HeadProduct
    scale: float = 1.0
    soft_cap: float | None = None

    def __call__(self, normed: Tensor) -> Tensor:
        """[R, hidden_size] -> [R, vocab_size] fp32"""
        logits = self.linear(normed).float()
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)

    def with_candidates(self, normed: Tensor, num_candidates: int) -> tuple[Tensor, Candidates]:
        """[R, hidden_size] -> logits [R, vocab_size] fp32 and the candidates of each row."""
        logits = self(normed)
        return logits, find_candidates(logits, num_candidates)


@dataclass(frozen=True, slots=True)
class Embedding:
    """Rows of a table [vocab_size, hidden_size], times `scale`, which is rounded to the table's dtype as Gemma's is.

    `dtype` is the dtype of the result; None means the table's.
    """

    table: Tensor
    scale: float = 1.0
    dtype: torch.dtype | None = None

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, hidden_size]"""
        hidden = F.embedding(token_ids, self.table).to(self.dtype or self.table.dtype)
        return hidden if self.scale == 1.0 else hidden * self.table.new_tensor(self.scale)


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """x / rms(x) * weight over the last dimension (RMSNorm, arXiv 1910.07467).

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
