"""Attention of a step's rows over the paged cache, one row and one formula at a time: the twin of `kernels.attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.ops.cuda.table import StepRows

LEAST_CHUNK = 256
"""Places of the shortest chunks of a text's keys, in which the kernels sum: a multiple of their blocks of keys."""

FIRST_CHUNKS = 32
"""Chunks of that length; then half as many come for each doubling of the text, twice as long each time."""


def chunk_of(place: int, *, least: int = LEAST_CHUNK, first: int = FIRST_CHUNKS) -> int:
    """The number of the chunk that a place of a text is in: a function of the place alone, as a row's sums must be."""
    if place < first * least:
        return place // least
    doublings = (place // (first * least)).bit_length() - 1
    return first + doublings * (first // 2) + (place - (first * least << doublings)) // (least << doublings + 1)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    output: Tensor,
    rows: StepRows,
    block_table: Tensor,
    *,
    block_size: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    num_hidden: int = 0,
) -> None:
    """Attend to the places of each row's own path, which hold keys and values already, this step's rows included.

    Args:
        query: [T, num_heads, key_dim]; heads h * G to h * G + G - 1 share key head h.
        keys: [num_slots, num_kv_heads, key_dim]
        values: [num_slots, num_kv_heads, value_dim]
        output: [T, num_heads, value_dim], written; padding rows are left as they are.
        rows: slots, positions, num_linear and path_slots are read.
        block_table: [S, B] int32, the blocks of each slot in order.
        block_size: places in a block of the cache.
        scale: factor on the scores.
        window: a row at position i sees positions above i - window; None means all positions.
        soft_cap: scores become soft_cap * tanh(scores / soft_cap); None leaves them.
        sinks: [num_heads] fp32, one extra logit per head in the softmax's denominator, or None.
        num_hidden: leading places that hold no entry.
    """
    group = query.shape[1] // keys.shape[1]
    for row, slot in enumerate(rows.slots.tolist()):
        if slot < 0:
            continue
        position = int(rows.positions[row])
        first = max(num_hidden, 0 if window is None else position + 1 - window)
        seen = _kv_slots(rows, block_table, row, slot, position, block_size)[first:]
        key = keys[seen].float().repeat_interleave(group, dim=1)
        value = values[seen].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,khd->hk", query[row].float(), key) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None]], dim=1)
        weights = scores.softmax(dim=-1)[:, : len(seen)]
        output[row] = torch.einsum("hk,khd->hd", weights, value).to(output.dtype)


def _kv_slots(rows: StepRows, block_table: Tensor, row: int, slot: int, position: int, block_size: int) -> Tensor:
    """Where the keys of places 0 to `position` of the row's path lie: [position + 1] int64."""
    num_linear = int(rows.num_linear[row])
    places = torch.arange(num_linear, device=rows.slots.device)
    linear = block_table[slot, places // block_size].long() * block_size + places % block_size
    return torch.cat([linear, rows.path_slots[row, : position + 1 - num_linear].long()])
