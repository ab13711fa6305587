"""Attention over a paged cache in few torch calls: the fast twin of `naive` for small batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.core.batch import ForwardBatch, SequenceRows
from forerun.kv.cache import KVCache, LayerKV
from forerun.ops.attention.base import Attend
from forerun.ops.attention.dense import attend_dense

MOST_ROWS_TOGETHER = 16  # sequences with more rows attend alone: padding the others to them costs more than a call
TILE_ROWS = 128  # rows of a prompt chunk that attend together; bounds the mask and skips keys no row sees


class PagedAttention:
    """Sequences with few rows attend together, padded to one shape; a long chunk attends in tiles.

    A row's position must lie in [num_context, num_context + num_rows), as positions of prompts,
    chains and trees do: keys that a window hides by this are not even gathered.
    """

    def begin(self, batch: ForwardBatch, cache: KVCache) -> Attend:
        """Group the sequences; what else layers share is prepared at the first layer that needs it."""
        first_rows = np.cumsum([0] + [sequence.num_rows for sequence in batch.sequences]).tolist()
        together: list[_Span] = []
        groups: list[_Group] = []
        for first_row, sequence in zip(first_rows[:-1], batch.sequences, strict=True):
            if sequence.num_rows <= MOST_ROWS_TOGETHER:
                together.append(_Span(first_row, sequence))
            else:
                groups += [_Group([tile], batch) for tile in _tiles(first_row, sequence)]
        groups += [_Group(spans, batch) for spans in _similar_lengths(together)]
        return _PagedPass(batch.slot_mapping, cache.layers, groups)


class _Span(NamedTuple):
    """Rows from `first_row` of the batch that attend as `sequence` says."""

    first_row: int
    sequence: SequenceRows

    @property
    def num_keys(self) -> int:
        return self.sequence.num_context + self.sequence.num_rows


def _tiles(first_row: int, sequence: SequenceRows) -> list[_Span]:
    """Cut causal rows into tiles: to a tile, the tiles before it are context like any other."""
    if sequence.tree_mask is not None:
        return [_Span(first_row, sequence)]
    return [
        _Span(
            first_row + start,
            replace(
                sequence,
                num_context=sequence.num_context + start,
                num_rows=min(TILE_ROWS, sequence.num_rows - start),
            ),
        )
        for start in range(0, sequence.num_rows, TILE_ROWS)
    ]


def _similar_lengths(spans: list[_Span]) -> list[list[_Span]]:
    """Split spans so that padding to the longest of a group at most about doubles its keys."""
    groups: list[list[_Span]] = []
    limit = 0
    for span in sorted(spans, key=lambda span: span.num_keys):
        if not groups or span.num_keys > limit:
            groups.append([])
            limit = 2 * span.num_keys + 64
        groups[-1].append(span)
    return [sorted(group) if len(group) > 1 else group for group in groups]


@dataclass(frozen=True, slots=True)
class _PagedPass:
    slot_mapping: Tensor
    layers: list[LayerKV]
    groups: list[_Group]

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
        output = query.new_empty(*query.shape[:2], value.shape[2])
        for group in self.groups:
            keys = group.keys(window, query.shape[1] // key.shape[1])
            rows = attend_dense(
                group.padded_rows(query),
                _padded_entries(kv.key, keys),
                _padded_entries(kv.value, keys),
                mask=keys.mask,
                scale=scale,
                soft_cap=soft_cap,
                sinks=sinks,
            )
            if group.owns_all(query):
                return rows.flatten(0, 1)
            group.place(rows, output)
        return output


class _Keys(NamedTuple):
    """The keys that a group sees under one window."""

    slots: slice | Tensor  # where they lie in the cache; a tensor is [B * C]
    shape: tuple[int, int]  # B, C
    mask: Tensor | None  # [B, 1, R * fold, C] bool


def _padded_entries(entries: Tensor, keys: _Keys) -> Tensor:
    """[B, C, num_kv_heads, dim]"""
    gathered = entries[keys.slots] if isinstance(keys.slots, slice) else entries.index_select(0, keys.slots)
    return gathered.unflatten(0, keys.shape)


class _Group:
    """Spans that attend in one call, padded to the same number of rows (R) and keys (C)."""

    def __init__(self, spans: list[_Span], batch: ForwardBatch) -> None:
        self._spans = spans
        self._positions = batch.positions
        self._block_size = batch.block_size
        self._first_rows = np.array([span.first_row for span in spans])
        self._num_rows = np.array([span.sequence.num_rows for span in spans])
        self._num_context = np.array([span.sequence.num_context for span in spans])
        self._shape = (len(spans), int(self._num_rows.max()))
        self._keys: dict[tuple[int | None, int], _Keys] = {}
