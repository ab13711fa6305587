"""Sequences of a batch padded to one shape, so that one dense attention call serves them."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forerun.core.batch import ForwardBatch, SequenceRows

Integers = npt.NDArray[np.int64]


class Span(NamedTuple):
    """Rows from `first_row` of the batch on, which attend as `sequence` says."""

    first_row: int
    sequence: SequenceRows

    @property
    def num_keys(self) -> int:
        """Context and new rows together."""
        return self.sequence.num_context + self.sequence.num_rows


class SeenKeys(NamedTuple):
    """The keys that a group sees under one window."""

    slots: slice | Tensor  # where they lie in the cache; a tensor is [B * C]
    shape: tuple[int, int]  # B, C
    mask: Tensor | None  # [B, R, C] bool; None where every row sees every key

    def gather(self, entries: Tensor) -> Tensor:
        """Keys or values [num_slots, num_kv_heads, dim] -> [B, C, num_kv_heads, dim]; a view where possible."""
        found = entries[self.slots] if isinstance(self.slots, slice) else entries.index_select(0, self.slots)
        return found.view(*self.shape, *found.shape[1:])


class PaddedGroup:
    """B spans padded to R rows and C keys.

    A padding row repeats its sequence's last row; a padding key repeats its sequence's last key and
    is masked. So no row of another sequence is read, not even to be multiplied by zero.
    """

    def __init__(self, spans: list[Span], batch: ForwardBatch) -> None:
        self._sequences = [span.sequence for span in spans]
        self._positions = batch.positions
        self._block_size = batch.block_size
        num_rows = [span.sequence.num_rows for span in spans]
        self._most_keys = max(span.num_keys for span in spans)
        self._shape = len(spans), max(num_rows)
        self._keys: dict[int | None, SeenKeys] = {}
        self._first_rows = np.array([span.first_row for span in spans])
        self._num_rows = np.array(num_rows)

        self._rows: slice | Tensor
        self._real: Tensor | None = None  # the padded rows that are no padding; None where there is no padding
        first, total = spans[0].first_row, len(spans) * self._shape[1]
        in_a_row = all(after.first_row - before.first_row == self._shape[1] for before, after in pairwise(spans))
        if in_a_row and sum(num_rows) == total:
            self._rows = slice(first, first + total)
            self.is_whole_batch = total == len(batch.positions)
        else:
            own = np.arange(self._shape[1])
            rows = self._first_rows[:, None] + np.minimum(own, self._num_rows[:, None] - 1)
            self._rows = self._on_device(rows.ravel())
            if sum(num_rows) < total:
                self._real = self._on_device(np.flatnonzero(own < self._num_rows[:, None]))
            self.is_whole_batch = False

    @cached_property
    def _num_context(self) -> Integers:
        return np.array([sequence.num_context for sequence in self._sequences])

    @cached_property
    def _num_keys(self) -> Integers:
        keys: Integers = self._num_context + self._num_rows
        return keys

    def take_rows(self, packed: Tensor) -> Tensor:
        """[T, ...] -> [B, R, ...]"""
        rows = packed[self._rows] if isinstance(self._rows, slice) else packed.index_select(0, self._rows)
        return rows.view(*self._shape, *rows.shape[1:])

    def place_rows(self, padded: Tensor, packed: Tensor) -> None:
        """Write the rows of `padded` [B, R, ...] that are no padding to where they belong in `packed` [T, ...]."""
        rows = padded.flatten(0, 1)
        if isinstance(self._rows, slice):
            packed[self._rows] = rows
        elif self._real is None:
            packed.index_copy_(0, self._rows, rows)
        else:
            packed.index_copy_(0, self._rows[self._real], rows[self._real])

    def seen_keys(self, window: int | None) -> SeenKeys:
        """What the group sees under `window`; prepared once, for all layers that have this window."""
        if window is not None and window >= self._most_keys:
            window = None
        found = self._keys.get(window)
        if found is None:
            # No row stands before num_context, so it sees no key before this one.
            first_seen = 0 * self._num_keys if window is None else np.maximum(0, self._num_context - window + 1)
            tokens = first_seen[:, None] + np.arange((self._num_keys - first_seen).max())
            found = self._keys[window] = SeenKeys(self._slots(tokens), tokens.shape, self._mask(tokens, window))
        return found

    def _slots(self, tokens: Integers) -> slice | Tensor:
        """Cache slots of `tokens` ([B, C] indices into each sequence): a slice if they lie in a row."""
        size = self._block_size
        if len(tokens) == 1:
            start, stop = int(tokens[0, 0]), int(tokens[0, -1]) + 1
            blocks = self._sequences[0].block_ids[start // size : -(-stop // size)]
            first_block = int(blocks[0])
            if np.array_equal(blocks, np.arange(first_block, first_block + len(blocks))):
                first_slot = first_block * size + start % size
                return slice(first_slot, first_slot + stop - start)
        tokens = np.minimum(tokens, self._num_keys[:, None] - 1)
        table = np.zeros((len(tokens), tokens.max() // size + 1), dtype=np.int64)
        for row, sequence in zip(table, self._sequences, strict=True):
            blocks = sequence.block_ids[: len(row)]
            row[: len(blocks)] = blocks
        slots = np.take_along_axis(table, tokens // size, axis=1) * size + tokens % size
        return self._on_device(slots.ravel())

    def _mask(self, tokens: Integers, window: int | None) -> Tensor | None:
        num_rows = self._shape[1]
        new_row = tokens - self._num_context[:, None]  # [B, C] which new row a key is; below 0: context
        hidden = np.array([sequence.num_hidden for sequence in self._sequences])
        is_plain = not hidden.any() and all(sequence.tree_mask is None for sequence in self._sequences)
        if is_plain and num_rows == 1 and not new_row[:, -1].any():
            return None  # each sequence's last key is its only row, which sees all before it
        visible = torch.from_numpy(new_row[:, None, :] <= np.arange(num_rows)[:, None])  # [B, R, C]
        for row, sequence in enumerate(self._sequences):
            if sequence.tree_mask is not None:
                end = sequence.num_context + sequence.num_rows - int(tokens[row, 0])
                masked = sequence.tree_mask[:, -end:]  # a window may have cut off the first
                visible[row, : sequence.num_rows, end - masked.shape[1] : end] = masked
        if hidden.any():
            visible &= torch.from_numpy(tokens >= hidden[:, None])[:, None]
        visible = visible.to(self._positions.device)
        if window is not None:
            visible &= self._inside_window(tokens, new_row, window)
        return visible

    def _inside_window(self, tokens: Integers, new_row: Integers, window: int) -> Tensor:
        """[B, R, C] bool; a context token's position is its index, a new row's is in the batch."""
        own = np.clip(new_row, 0, self._num_rows[:, None] - 1)
        new_positions = self._positions[self._on_device(self._first_rows[:, None] + own)]
        key_positions = torch.where(self._on_device(new_row >= 0), new_positions, self._on_device(tokens))
        return key_positions[:, None, :] > self.take_rows(self._positions)[:, :, None] - window

    def _on_device(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._positions.device)
