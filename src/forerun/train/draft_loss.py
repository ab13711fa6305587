"""The loss of drafted logits, with its gradient in the same sweep: no tensor of all rows and all tokens is kept in fp32.

The kernels compute the loss of a row, and the target's probabilities, where there are any; what is written here is their twin.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forerun.ops.native.library import Kernels
from forerun.ops.native.training import draft_loss_in_place

ROWS_AT_ONCE = {"cpu": 128, "cuda": 1024}
"""Rows of logits in fp32 at a time: few of them stay in a core's cache, while a GPU wants few calls."""

HYBRID_DECAY = 3.0  # of the divergence's share as acceptance rises


class _DraftLoss(torch.autograd.Function):
    """The sum of `loss_and_gradient` over rows; the gradient is computed together with the loss."""

    @staticmethod
    def forward(
        ctx: Any,
        normed: Tensor,
        weight: Tensor,
        wanted: Tensor,
        is_hybrid: bool,
        measured: Tensor | None,
        kernels: Kernels | None,
    ) -> Tensor:
        gradients = normed @ weight.T  # the logits, until their gradients take their place
        if kernels is None:
            losses = loss_in_place(gradients, wanted, is_hybrid=is_hybrid, measured=measured)
        else:
            losses = draft_loss_in_place(kernels, gradients, wanted, is_hybrid=is_hybrid, measured=measured)
        of_weight = gradients.T @ normed if ctx.needs_input_grad[1] else normed.new_empty(0)
        ctx.save_for_backward(gradients @ weight, of_weight)
        return losses.sum(dtype=torch.float64).float()

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor) -> tuple[Tensor | None, ...]:
        of_normed, of_weight = ctx.saved_tensors
        scaled = of_weight * of_loss.to(of_weight.dtype) if ctx.needs_input_grad[1] else None
        return of_normed * of_loss.to(of_normed.dtype), scaled, None, None, None, None


def draft_loss(
    normed: Tensor,
    weight: Tensor,
    wanted: Tensor,
    *,
    is_hybrid: bool,
    measured: Tensor | None = None,
    kernels: Kernels | None = None,
) -> Tensor:
    """Compute the loss of a head's rows, summed over them.

    Args:
        normed: what the LM head multiplies, [R, width].
        weight: the LM head, [V, width].
        wanted: the target's probabilities of the tokens that can be drafted, [R, V], not renormalised over them.
        is_hybrid: whether the loss is the acceptance-directed hybrid.
        measured: [2] float64, to which `measure` of all rows is added; None measures nothing.
        kernels: compute losses and gradients; None: torch does.
    """
    loss: Tensor = _DraftLoss.apply(normed, weight, wanted, is_hybrid, measured, kernels)  # type: ignore[no-untyped-call]
    return loss


def loss_in_place(logits: Tensor, wanted: Tensor, *, is_hybrid: bool, measured: Tensor | None) -> Tensor:
    """Turn logits [R, V] into the gradient of the loss by them and return the rows' losses [R], the twin of `draft_loss_in_place`."""
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    at_once = ROWS_AT_ONCE[logits.device.type]
    for first in range(0, len(logits), at_once):
        rows = slice(first, first + at_once)
        wide = logits[rows].float()
        if measured is not None:
            measured += measure(wide, wanted[rows])
        losses[rows], gradient = loss_and_gradient(wide, wanted[rows].float(), is_hybrid=is_hybrid)
        logits[rows] = gradient
    return losses


def loss_and_gradient(logits: Tensor, wanted: Tensor, *, is_hybrid: bool) -> tuple[Tensor, Tensor]:
    """Compute the losses of rows [R] and their gradient by the logits [R, V], all fp32.

    Where a target gives the drafted vocabulary p [V], which sums to m <= 1, and a head q = softmax(logits) [V]:
    the loss is -sum(p log q), and in the hybrid form (LK, arXiv 2602.23881) w of that plus (1 - w)(1 - a), with
    a = sum(min(p, q)), the chance that a draft from q is accepted, and w = exp(-3 a), taken as constant.
    """
    log_odds = logits.log_softmax(-1)
    losses = -torch.linalg.vecdot(wanted, log_odds)
    odds = log_odds.exp_()
    mass = wanted.sum(-1, keepdim=True)
    if not is_hybrid:
        return losses, odds.mul_(mass).sub_(wanted)
    # where a head's chance is below the target's it is accepted in full, and raising it raises acceptance
    below = torch.where(odds < wanted, odds, 0.0)
    sum_below = below.sum(-1, keepdim=True)
    accepted = torch.minimum(wanted, odds).sum(-1)
    share = (-HYBRID_DECAY * accepted).exp()
    gradient = odds.mul(share[:, None] * mass + (1 - share)[:, None] * sum_below)
    gradient.addcmul_(wanted, share[:, None], value=-1.0).addcmul_(below, (1 - share)[:, None], value=-1.0)
    return share * losses + (1 - share) * (1 - accepted), gradient


def measure(logits: Tensor, wanted: Tensor) -> Tensor:
    """Sum over rows: the chance that a draft is accepted at temperature 1, and whether both first choices are equal; [2] float64."""
    wanted = wanted.float()
    accepted = torch.minimum(wanted, logits.softmax(-1)).sum()
    equal = (logits.argmax(-1) == wanted.argmax(-1)).sum()
    return torch.stack([accepted, equal]).double()


def drafted_probs(logits: Tensor, draft_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute of the softmax of logits [R, vocab_size] fp32 the probabilities of some tokens [V]: [R, V] in `dtype`."""
    odds = logits.sub_(logits.amax(-1, keepdim=True)).exp_()
    return (odds.index_select(1, draft_ids) / odds.sum(-1, keepdim=True)).to(dtype)
