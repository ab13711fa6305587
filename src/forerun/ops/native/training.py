"""What training a head takes of the kernels; the twins are in `forerun.train.draft_loss` and torch's own attention."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.ops.native.library import Kernels
from forerun.ops.native.structs import STORAGE


def draft_loss_in_place(
    kernels: Kernels, logits: Tensor, wanted: Tensor, *, is_hybrid: bool, measured: Tensor | None = None
) -> Tensor:
    """Turn logits [R, V] into the gradient of a head's loss by them, and return the rows' losses [R] fp32.

    Args:
        kernels: compute it.
        logits: fp32 or bf16, contiguous.
        wanted: the target's probabilities, as many, of the same dtype.
        is_hybrid: whether the loss is the acceptance-directed hybrid.
        measured: [2] float64, to which is added what `train.draft_loss.measure` gives; None measures nothing.
    """
    num_rows, count = logits.shape
    wanted = wanted.contiguous()
    assert logits.is_contiguous()
    assert wanted.shape == logits.shape
    assert wanted.dtype == logits.dtype
    losses = torch.empty(num_rows)
    of_rows = None if measured is None else torch.empty(num_rows, 2)
    kernels.draft_loss(
        *(logits.data_ptr(), wanted.data_ptr(), num_rows, count, STORAGE[logits.dtype], is_hybrid, losses.data_ptr()),
        None if of_rows is None else of_rows.data_ptr(),
    )
    if measured is not None and of_rows is not None:
        measured += of_rows.double().sum(0)
    return losses


def drafted_probs(kernels: Kernels, logits: Tensor, draft_ids: Tensor, *, out: Tensor) -> None:
    """Write of the softmax of logits [R, vocab_size] fp32 the probabilities of some tokens [V] int64 to `out` [R, V].

    Raises:
        ValueError: a token is outside of the vocabulary.
    """
    assert logits.is_contiguous()
    assert logits.dtype == torch.float32
    assert draft_ids.is_contiguous()
    assert out.is_contiguous()
    assert out.shape == (len(logits), len(draft_ids))
    kernels.drafted_probs(
        *(logits.data_ptr(), *logits.shape, draft_ids.data_ptr(), len(draft_ids), STORAGE[out.dtype], out.data_ptr())
    )


def can_compute_gradients(query: Tensor) -> bool:
    """Whether `attention_gradients` takes such queries, [..., dim]."""
    return query.dtype == torch.bfloat16 and query.shape[-1] % 32 == 0


def attention_gradients(
    kernels: Kernels,
    of_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sums: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of causal attention by queries, keys and values, all [B, heads, R, dim] bf16.

    Args:
        kernels: compute it.
        of_out: the gradient by the output.
        query: as attended.
        key: as attended, with as many heads.
        value: likewise.
        out: the output, which may be that of attention to more keys, with `log_sums` of all.
        log_sums: the logarithms of the sums of exponentials, [B, heads, R] fp32.
        scale: factor of the scores.
    """
    num_texts, num_heads, num_rows, dim = query.shape
    read = [tensor.contiguous() for tensor in (query, key, value, out, log_sums, of_out)]
    of_query, of_key, of_value = (torch.empty(query.shape, dtype=query.dtype) for _ in range(3))
    kernels.attention_gradients(
        *(tensor.data_ptr() for tensor in read),
        *(num_texts * num_heads, num_rows, dim, scale),
        *(tensor.data_ptr() for tensor in (of_query, of_key, of_value)),
    )
    return of_query, of_key, of_value
