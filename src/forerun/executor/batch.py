"""The tensors of a forward pass, made of the integers of a plan."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from forerun.core.batch import ForwardBatch, SequenceRows
from forerun.core.draft import Draft
from forerun.core.step import PlannedSequence, Rows
from forerun.kv.cache import map_memory

MOST_STAGED_ROWS = 256
"""Steps of up to so many rows have their numbers in the same memory each time."""

MOST_KEPT_NODES = 32
"""The masks of trees of up to so many nodes are kept."""


class _StagedRows:
    """Memory for the numbers of a step on the CPU, and tensors of it: making these takes longer than filling them."""

    def __init__(self, num_rows: int) -> None:
        self._numbers = array("q", bytes(3 * 8 * num_rows))
        self._num_rows = num_rows
        rows = torch.frombuffer(self._numbers, dtype=torch.int64).view(3, num_rows)
        self.token_ids, self.positions, self.slots = rows.unbind()
        self.all_rows = torch.arange(num_rows)

    def fill(self, rows: Rows) -> None:
        numbers, count = self._numbers, self._num_rows
        numbers[:count] = array("q", rows.token_ids)
        numbers[count : 2 * count] = array("q", rows.positions)
        numbers[2 * count :] = array("q", rows.slots)


class _LogitsMemory:
    """Memory for the logits of steps on the CPU: of many rows the system would give new pages to each step, one by one.

    It is mapped, so that it goes back to the system when more is needed: an allocator would keep it.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._all = torch.empty(0, vocab_size)
        self._of_rows: dict[int, Tensor] = {}

    def of_rows(self, num_rows: int) -> Tensor:
        """[num_rows, vocab_size] fp32, the same memory each time."""
        found = self._of_rows.get(num_rows)
        if found is None:
            if num_rows > len(self._all):
                memory = map_memory(num_rows * self._vocab_size * torch.float32.itemsize)
                self._all = torch.frombuffer(memory, dtype=torch.float32).view(num_rows, self._vocab_size)
                self._of_rows.clear()
            found = self._of_rows[num_rows] = self._all[:num_rows]
        return found


class BatchBuilder:
    """Builds batches for one device and block size; on a CPU a batch, and its logits, are good until the next one is built."""

    def __init__(
        self,
        *,
        block_size: int,
        device: torch.device,
        features: frozenset[str],
        num_candidates: int,
        vocab_size: int,
    ) -> None:
        self._block_size = block_size
        self._device = device
        self._is_on_cpu = device.type == "cpu"
        self.features = features
        self.num_candidates = num_candidates
        self._staged: dict[int, _StagedRows] = {}  # by the number of rows
        self._logits = _LogitsMemory(vocab_size) if self._is_on_cpu else None

    def build(self, sequences: Sequence[PlannedSequence], rows: Rows, drafts: Sequence[Draft]) -> ForwardBatch:
        """Tensors of a plan's rows, and a mask where a draft is a tree."""
        token_ids, positions, slots, logits_rows = self._tensors(rows)
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slots,
            sequences=sequence_rows(sequences, drafts),
            block_size=self._block_size,
            logits_rows=logits_rows,
            features=self.features,
            num_candidates=self.num_candidates,
            logits=None if self._logits is None else self._logits.of_rows(len(rows.logits_rows)),
        )

    def _tensors(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Token ids, positions, slots and the rows with logits."""
        num_rows = len(rows.token_ids)
        if not self._is_on_cpu or not 0 < num_rows <= MOST_STAGED_ROWS:
            # one tensor of all rows: making each would take as long
            token_ids, positions, slots = self._tensor((rows.token_ids, rows.positions, rows.slots)).unbind()
            return token_ids, positions, slots, self._tensor(rows.logits_rows)
        staged = self._staged.get(num_rows)
        if staged is None:
            staged = self._staged[num_rows] = _StagedRows(num_rows)
        staged.fill(rows)
        has_all = len(rows.logits_rows) == num_rows
        logits_rows = staged.all_rows if has_all else self._tensor(rows.logits_rows)
        return staged.token_ids, staged.positions, staged.slots, logits_rows

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        tensor = torch.from_numpy(np.array(values, dtype=np.int64))
        return tensor if self._is_on_cpu else tensor.to(self._device)


def _mask(num_tail: int, parents: tuple[int, ...]) -> Tensor | None:
    """`tree_mask`; those of one row and a small tree are kept, as they come again."""
    return _mask_of_tree(parents) if num_tail == 1 and len(parents) <= MOST_KEPT_NODES else tree_mask(num_tail, parents)


@lru_cache(maxsize=1024)
def _mask_of_tree(parents: tuple[int, ...]) -> Tensor | None:
    return tree_mask(1, parents)


def sequence_rows(sequences: Sequence[PlannedSequence], drafts: Sequence[Draft]) -> list[SequenceRows]:
    """The rows of each planned sequence that has any, as attention reads them."""
    return [
        SequenceRows(
            num_context=planned.start,
            num_rows=planned.num_tail + len(draft.token_ids),
            block_ids=planned.blocks,
            tree_mask=None if draft.parents is None else _mask(planned.num_tail, draft.parents),
        )
        for planned, draft in zip(sequences, drafts, strict=True)
        if planned.num_tail
    ]


def tree_mask(num_tail: int, parents: tuple[int, ...]) -> Tensor | None:
    """[num_rows, num_rows] bool: tail rows are causal; a node sees the tail, its ancestors, itself. None: all are causal."""
    if parents == tuple(range(-1, len(parents) - 1)):
        return None
    num_rows = num_tail + len(parents)
    mask = np.tri(num_rows, dtype=bool)  # NumPy, since torch takes ten times as long for a row this short
    mask[num_tail:, num_tail:] = False
    for node, parent in enumerate(parents):
        row = num_tail + node
        if parent >= 0:
            mask[row, num_tail:] = mask[num_tail + parent, num_tail:]
        mask[row, row] = True
    return torch.from_numpy(mask)
