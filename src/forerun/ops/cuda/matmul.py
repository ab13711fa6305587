"""Matrix products of a step's rows with a layer's weights, by formula: the twin of `kernels.matmul`.

Products are summed in fp32; what comes after the sum is computed in fp32 too, and rounded once.
"""

from __future__ import annotations

from torch import Tensor

from forerun.ops.layers import ACTIVATIONS


def linear(x: Tensor, weight: Tensor, output: Tensor, *, bias: Tensor | None = None) -> None:
    """Write x @ weight.T + bias: x [T, K], weight [N, K], bias [N] or None -> output [T, N]."""
    output.copy_(_product(x, weight, bias).to(output.dtype))


def add_linear(x: Tensor, weight: Tensor, residual: Tensor, *, bias: Tensor | None = None, scale: float = 1.0) -> None:
    """Add (x @ weight.T + bias) * scale to `residual` [T, N] fp32 in place."""
    residual += _product(x, weight, bias) * scale


def gated_linear(x: Tensor, gate_up: Tensor, output: Tensor, *, activation: str) -> None:
    """Write activation(gate) * up: x [T, K], gate_up [2 * N, K], gates first -> output [T, N].

    `activation` is a name of `ops.layers.ACTIVATIONS`.
    """
    gate, up = _product(x, gate_up, None).chunk(2, dim=-1)
    output.copy_((ACTIVATIONS[activation](gate) * up).to(output.dtype))


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = x.float() @ weight.float().T
    return product if bias is None else product + bias.float()
