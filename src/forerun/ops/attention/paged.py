"""Attention over a paged cache in few torch calls: the fast twin of `naive` for small batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from torch import Tensor

from forerun.core.batch import ForwardBatch, SequenceRows
from forerun.kv.cache import KVCache, LayerKV
from forerun.ops.attention.base import Attend
from forerun.ops.attention.dense import attend_dense
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

    def begin(self, batch: ForwardBatch, cache: KVCache) -> Attend:
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
        return _PagedPass(batch.slot_mapping, cache.layers, [PaddedGroup(group, batch) for group in groups])


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


@dataclass(frozen=True, slots=True)
class _PagedPass:
    slot_mapping: Tensor
    layers: list[LayerKV]
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
        kv = self.layers[layer]
        kv.key.index_copy_(0, self.slot_mapping, key)
        kv.value.index_copy_(0, self.slot_mapping, value)
        num_rows, num_heads = query.shape[:2]
        output: Tensor | None = None
        for group in self.groups:
            seen = group.seen_keys(window)
            rows = attend_dense(
                group.take_rows(query),
                seen.gather(kv.key),
                seen.gather(kv.value),
                mask=seen.mask,
                scale=scale,
                soft_cap=soft_cap,
                sinks=sinks,
            )
            if group.is_whole_batch:
                return rows.flatten(0, 1)
            if output is None:
                output = query.new_empty(num_rows, num_heads, value.shape[2])
            group.place_rows(rows, output)
        return query.new_empty(0, num_heads, value.shape[2]) if output is None else output
