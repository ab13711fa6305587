"""Attention over a paged cache, one sequence and one formula at a time: the oracle for all others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.core.batch import ForwardBatch, SequenceRows
from forerun.kv.cache import KVCache, LayerKV
from forerun.ops.attention import Attend


class NaiveAttention:
    """Softmax attention as the textbook writes it, with scores in fp32 (fp64 for fp64 inputs)."""

    def begin(self, batch: ForwardBatch, cache: KVCache) -> Attend:
        """Bind batch and cache; nothing is prepared."""
        return _NaivePass(batch, cache)


@dataclass(frozen=True, slots=True)
class _NaivePass:
    batch: ForwardBatch
    cache: KVCache

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        kv = self.cache.layers[layer]
        kv.key[self.batch.slot_mapping] = key
        kv.value[self.batch.slot_mapping] = value
        outputs = []
        first_row = 0
        for sequence in self.batch.sequences:
            rows = slice(first_row, first_row + sequence.num_rows)
            first_row = rows.stop
            visible = _visible(sequence, self.batch.positions[rows], window)
            keys, values = _gather(kv, sequence, self.batch.block_size)
            scores = _scores(query[rows], keys, scale=scale, soft_cap=soft_cap)
            weights = _softmax(scores.masked_fill(~visible, float("-inf")), sinks)
            outputs.append(_weighted_values(weights, values, visible).to(query.dtype))
        return torch.cat(outputs)


def _visible(sequence: SequenceRows, positions: Tensor, window: int | None) -> Tensor:
    """[num_rows, num_context + num_rows] bool: which keys each row sees."""
    num_rows = sequence.num_rows
    masked = sequence.tree_mask
    if masked is None:
        masked = torch.ones(num_rows, num_rows, dtype=torch.bool).tril()
    context = torch.ones(num_rows, sequence.num_context + num_rows - masked.shape[1], dtype=torch.bool)
    context[:, : sequence.num_hidden] = False
    visible = torch.cat([context, masked.to(context.device)], dim=1).to(positions.device)
    if window is None:
        return visible
    context_positions = torch.arange(sequence.num_context, device=positions.device)
    key_positions = torch.cat([context_positions, positions])
    return visible & (key_positions[None, :] > positions[:, None] - window)


def _gather(kv: LayerKV, sequence: SequenceRows, block_size: int) -> tuple[Tensor, Tensor]:
    """Keys and values of the sequence, in order: [num_context + num_rows, num_kv_heads, dim]."""
    length = sequence.num_context + sequence.num_rows
    block_ids = sequence.block_ids.tolist()
    slots = torch.tensor([block_ids[i // block_size] * block_size + i % block_size for i in range(length)])
    slots = slots.to(kv.key.device)
    return kv.key[slots], kv.value[slots]


def _scores(query: Tensor, keys: Tensor, *, scale: float, soft_cap: float | None) -> Tensor:
    """[num_heads, num_rows, num_keys]; query heads h * G to h * G + G - 1 share key head h (GQA)."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    num_groups = query.shape[1] // keys.shape[1]
    keys = keys.repeat_interleave(num_groups, dim=1)
    scores = torch.einsum("rhd,khd->hrk", query.to(dtype), keys.to(dtype)) * scale
    return scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over keys; a sink takes part in the denominator and then has no value to add."""
    if sinks is None:
        return scores.softmax(dim=-1)
    sink = sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]


def _weighted_values(weights: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """[num_rows, num_heads, value_dim]; a value that a row does not see takes no part, be it finite or not."""
    values = values.repeat_interleave(weights.shape[0] // values.shape[1], dim=1).to(weights.dtype)
    rows = [
        torch.einsum("hk,khd->hd", weights[:, row, seen], values[seen]) for row, seen in enumerate(visible.unbind(0))
    ]
    return torch.stack(rows)
