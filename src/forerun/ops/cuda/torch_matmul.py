"""Matrix products of a step's rows by torch, which is cuBLAS on a GPU: as fast as the library is, but a row's bits may
depend on the rows beside it.

The functions are those of `ops.cuda.matmul`, with the same names and arguments; nothing in them waits for the host, so that a
CUDA graph can hold them. They are an option (`device_matmul="torch"`), and what the kernels are measured against.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.ops.layers import ACTIVATIONS


def linear(x: Tensor, weight: Tensor, output: Tensor, *, bias: Tensor | None = None) -> None:
    """Write x @ weight.T + bias: x [T, K], weight [N, K], bias [N] or None -> output [T, N]."""
    if output.dtype == x.dtype and bias is None:
        torch.mm(x, weight.T, out=output)
    else:
        output.copy_(_product(x, weight, bias))


def capped_linear(x: Tensor, weight: Tensor, output: Tensor, *, factor: float = 1.0, cap: float = 0.0) -> None:
    """Write cap * tanh(factor * (x @ weight.T) / cap), or without the cap where it is 0: -> output [T, N] fp32."""
    output.copy_(_product(x, weight, None))
    if factor != 1.0:
        output *= factor
    if cap:
        output.div_(cap).tanh_().mul_(cap)


def add_linear(x: Tensor, weight: Tensor, residual: Tensor, *, bias: Tensor | None = None, scale: float = 1.0) -> None:
    """Add (x @ weight.T + bias) * scale to `residual` [T, N] fp32 in place."""
    residual.add_(_product(x, weight, bias), alpha=scale)


def gated_linear(x: Tensor, gate_up: Tensor, output: Tensor, *, activation: str, bias: Tensor | None = None) -> None:
    """Write activation(gate) * up: x [T, K], gate_up [2 * N, K], bias [2 * N] or None, gates first -> output [T, N].

    `activation` is a name of `ops.layers.ACTIVATIONS`.
    """
    gate, up = _product(x, gate_up, bias).chunk(2, dim=-1)
    torch.mul(ACTIVATIONS[activation](gate), up, out=output)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[T, N] in x's dtype, in which the library rounds its sums."""
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))
