"""Matrix products of a step's rows with a layer's weights, by formula: the twin of `kernels.matmul`.

Products are summed in fp32; what comes after the sum is computed in fp32 too, and rounded once. Each row is computed by
itself, since torch's sums and functions of many rows may differ in bits from those of one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forerun.ops.layers import ACTIVATIONS


def linear(x: Tensor, weight: Tensor, output: Tensor, *, bias: Tensor | None = None) -> None:
    """Write x @ weight.T + bias: x [T, K], weight [N, K], bias [N] or None -> output [T, N]."""
    output.copy_(_product(x, weight, bias))


def capped_linear(x: Tensor, weight: Tensor, output: Tensor, *, factor: float = 1.0, cap: float = 0.0) -> None:
    """Write cap * tanh(factor * (x @ weight.T) / cap), or without the cap where it is 0: -> output [T, N] fp32."""

    def capped(row: Tensor) -> Tensor:
        return row * factor if cap == 0 else cap * torch.tanh(row * factor / cap)

    output.copy_(_by_row(capped, _product(x, weight, None)))


def add_linear(x: Tensor, weight: Tensor, residual: Tensor, *, bias: Tensor | None = None, scale: float = 1.0) -> None:
    """Add (x @ weight.T + bias) * scale to `residual` [T, N] fp32 in place."""
    residual += _product(x, weight, bias) * scale


def gated_linear(x: Tensor, gate_up: Tensor, output: Tensor, *, activation: str, bias: Tensor | None = None) -> None:
    """Write activation(gate) * up: x [T, K], gate_up [2 * N, K], bias [2 * N] or None, gates first -> output [T, N].

    `activation` is a name of `ops.layers.ACTIVATIONS`.
    """
    gate, up = _product(x, gate_up, bias).chunk(2, dim=-1)
    output.copy_(_by_row(ACTIVATIONS[activation], gate) * up)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide = weight.float()
    product = _by_row(lambda row: wide @ row, x.float()) if len(x) else x.new_empty(0, len(weight), dtype=torch.float32)
    return product if bias is None else product + bias.float()


def _by_row(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """A function of each row, [T, K] -> [T, N]; rows are copied, so that all begin at the same kind of address."""
    return torch.stack([function(row.clone()) for row in rows]) if len(rows) else rows
