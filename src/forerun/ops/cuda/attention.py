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
    num_kv_heads = keys.shape[1]
    linear = _places_of_blocks(block_table, block_size)
    positions, nums_linear = rows.positions.tolist(), rows.num_linear.tolist()
    for row, slot in enumerate(rows.slots.tolist()):
        if slot < 0:
            continue
        position, num_linear = positions[row], nums_linear[row]
        first = max(num_hidden, 0 if window is None else position + 1 - window)
        seen = linear[slot, :num_linear]
        if position + 1 > num_linear:  # a node beside a tree's first branch
            seen = torch.cat([seen, rows.path_slots[row, : position + 1 - num_linear].long()])
        seen = seen[first:]
        key = keys.index_select(0, seen).float().permute(1, 2, 0)
        value = values.index_select(0, seen).float().transpose(0, 1)
        scores = query[row].float().reshape(num_kv_heads, -1, key.shape[1]) @ key * scale  # [key heads, G, places]
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if sinks is not None:
            scores = torch.cat([scores, sinks.reshape(num_kv_heads, -1, 1)], dim=2)
        weights = scores.softmax(dim=-1)[..., : len(seen)]
        output[row] = (weights @ value).flatten(0, 1).to(output.dtype)


def _places_of_blocks(block_table: Tensor, block_size: int) -> Tensor:
    """Where the places of each slot's blocks lie, one after the other: [S, B] -> [S, B * block_size] int64."""
    within = torch.arange(block_size, device=block_table.device)
    return (block_table.long()[:, :, None] * block_size + within).flatten(1)
