"""Attention over a paged cache in few torch calls: the fast twin of `naive` for small batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.batch import ForwardBatch, SequenceRows
from forerun.kv.cache import KVCache, LayerKV
from forerun.ops.attention.padded import PaddedGroup, Span

MOST_ROWS_TOGETHER = 16  # a sequence with more rows attends alone: padding others to it costs more than a call
TILE_ROWS = 128  # rows of a long chunk that attend together: bounds the mask, skips keys that no row sees
# Keys gathered for one call. On CPU they must stay in the core's cache (2 to 3 times faster than what
# must come back from memory); a GPU wants few calls, within reason for its memory.
KEYS_PER_CALL = {"cpu": 2048, "cuda": 262144}


class PagedAttention:
    """Sequences with few rows attend together, padded to one shape; a long chunk attends in tiles.

    A row's position must lie in [num_context, num_context + num_rows), as positions of prompts,
    chains and trees do: keys that a window therefore hides are not even gathered.
    """

    def begin(self, batch: ForwardBatch, cache: KVCache) -> PagedPass:
        """Group the sequences; slots and masks are prepared by the first layer with a new window."""
        together: list[Span] = []
        alone: list[Span] = []
        first_rows = accumulate((sequence.num_rows for sequence in batch.sequences), initial=0)
        for sequence, first_row in zip(batch.sequences, first_rows, strict=False):
            if sequence.num_rows <= MOST_ROWS_TOGETHER:
                together.append(Span(first_row, sequence))
            else:
                alone += _tiles(first_row, sequence)
        small_groups = _similar_lengths(together, KEYS_PER_CALL[batch.positions.device.type])
        groups = [*small_groups, *([tile] for tile in alone)]
        return PagedPass(batch, cache, [PaddedGroup(group, batch) for group in groups])


def _tiles(first_row: int, sequence: SequenceRows) -> list[Span]:
    """Cut causal rows into tiles: to a tile, the tiles before it are context like any other."""
    if sequence.tree_mask is not None:
        return [Span(first_row, sequence)]
    tiles = []
    for start in range(0, sequence.num_rows, TILE_ROWS):
        num_rows = min(TILE_ROWS, sequence.num_rows - start)
        tile = replace(sequence, num_context=sequence.num_context + start, num_rows=num_rows)
        tiles.append(Span(first_row + start, tile))
    return tiles


def _similar_lengths(spans: list[Span], keys_per_call: int) -> list[list[Span]]:
    """Split so that padding to a group's longest at most about doubles the others' keys, and few are gathered."""
    groups: list[list[Span]] = []
    longest = -1
    for span in sorted(spans, key=lambda span: span.num_keys):
        if span.num_keys > longest or (len(groups[-1]) + 1) * span.num_keys > keys_per_call:
            groups.append([])
            longest = 2 * span.num_keys + 64
        groups[-1].append(span)
    return [sorted(group, key=lambda span: span.first_row) for group in groups]


class ScoreOptions(TypedDict):
    """What `attend_dense` takes beside its tensors."""

    scale: float
    soft_cap: float | None
    sinks: Tensor | None


@dataclass(frozen=True, slots=True)
class PagedPass:
    """Attention of one pass, an `Attend`. In a cache with room for more heads, layers use the first."""

    batch: ForwardBatch
    cache: KVCache
    groups: list[PaddedGroup]

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
        """See `Attend`."""
        kv = self.cache.layers[layer]
        if key.shape[1] < kv.key.shape[1]:
            kv = LayerKV(kv.key[:, : key.shape[1]], kv.value[:, : key.shape[1]])
        kv.key.index_copy_(0, self.batch.slot_mapping, key)
        kv.value.index_copy_(0, self.batch.slot_mapping, value)
        num_rows, num_heads = query.shape[:2]
        options = ScoreOptions(scale=scale, soft_cap=soft_cap, sinks=sinks)
        output: Tensor | None = None
        for group in self.groups:
            seen = group.seen_keys(window)
            dense = group.take_rows(query), seen.gather(kv.key), seen.gather(kv.value)
            rows = attend_dense(*dense, mask=seen.mask, **options)
            # (Not asked on a GPU, which would have to be waited for.)
            if seen.mask is not None and not rows.is_cuda and not rows.isfinite().all():
                _attend_alone(rows, *dense, mask=seen.mask, **options)
            if group.is_whole_batch:
                return rows.flatten(0, 1)
            if output is None:
                output = query.new_empty(num_rows, num_heads, value.shape[2])
            group.place_rows(rows, output)
        return query.new_empty(0, num_heads, value.shape[2]) if output is None else output


def attend_dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend over padded, dense tensors.

    Query heads that share a key head are folded into rows, so that no key is copied. With few rows the keys are most of
    the memory traffic: on CPU folding takes about half the time of `enable_gqa` (and a twelfth in bf16 with one row).

    Args:
        query: [B, R, num_heads, key_dim]
        key: [B, C, num_kv_heads, key_dim]
        value: [B, C, num_kv_heads, value_dim]
        mask: [B, R, C] bool, whether a row sees a key; None where every row sees every key.
        scale: factor on the scores.
        soft_cap: scores become soft_cap * tanh(scores / soft_cap); None leaves them.
        sinks: [num_heads] one extra logit per head in the softmax's denominator, or None.

    Returns:
        [B, R, num_heads, value_dim]
    """
    batch, rows, num_heads, key_dim = query.shape
    num_kv_heads, value_dim = value.shape[2:]
    group = num_heads // num_kv_heads
    # [B, num_kv_heads, R * group, key_dim]
    folded = query.view(batch, rows, num_kv_heads, group, key_dim).transpose(1, 2).flatten(2, 3)
    key, value = key.transpose(1, 2), value.transpose(1, 2)
    if mask is not None:
        mask = mask.repeat_interleave(group, dim=1)[:, None]  # [B, 1, R * group, C]
    if soft_cap is None and sinks is None:
        output = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
    else:
        scores = _capped_scores(folded, key, scale=scale, soft_cap=soft_cap)
        if mask is not None:
            scores = scores.masked_fill_(~mask, float("-inf"))
        if sinks is not None:
            sinks = sinks.view(num_kv_heads, 1, group).expand(-1, rows, -1).reshape(1, num_kv_heads, -1, 1)
        output = torch.matmul(_softmax(scores, sinks).to(value.dtype), value)
    unfolded = output.reshape(batch, num_kv_heads, rows, group, value_dim).transpose(1, 2)
    return unfolded.reshape(batch, rows, num_heads, value_dim)


def _attend_alone(
    rows: Tensor, query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor, **options: Unpack[ScoreOptions]
) -> None:
    """Compute the rows that are not finite anew, each from nothing but what it sees.

    A masked score that is NaN stays NaN, and zero times a value that is not finite is NaN, too.
    """
    for sequence, row in (~rows.isfinite().flatten(2).all(dim=2)).nonzero().tolist():
        seen = mask[sequence, row]
        alone = query[sequence, row][None, None], key[sequence, seen][None], value[sequence, seen][None]
        rows[sequence, row] = attend_dense(*alone, mask=None, **options)[0, 0]


def _capped_scores(query: Tensor, key: Tensor, *, scale: float, soft_cap: float | None) -> Tensor:
    """[B, num_kv_heads, rows, C] in fp32, or fp64 for fp64 inputs."""
    scores = torch.matmul(query, key.transpose(2, 3))
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).mul_(scale)
    return scores if soft_cap is None else scores.div_(soft_cap).tanh_().mul_(soft_cap)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return scores.softmax(dim=-1)
    sink = sinks.to(scores.dtype).expand(scores.shape[0], -1, -1, -1)
    return torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
