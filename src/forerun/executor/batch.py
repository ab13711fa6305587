"""The tensors of a forward pass, made of the integers of a plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from forerun.core.batch import ForwardBatch, SequenceRows
from forerun.core.draft import Draft
from forerun.core.step import PlannedSequence, Rows


class BatchBuilder:
    """Builds batches for one device and block size."""

    def __init__(
        self, *, block_size: int, device: torch.device, features: frozenset[str], num_candidates: int = 0
    ) -> None:
        self._block_size = block_size
        self._device = device
        self._is_on_cpu = device.type == "cpu"
        self.features = features
        self.num_candidates = num_candidates

    def build(self, sequences: Sequence[PlannedSequence], rows: Rows, drafts: Sequence[Draft]) -> ForwardBatch:
        """Tensors of a plan's rows, and a mask where a draft is a tree."""
        # one tensor of all rows: making each would take as long
        token_ids, positions, slots = self._tensor((rows.token_ids, rows.positions, rows.slots)).unbind()
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slots,
            sequences=sequence_rows(sequences, drafts),
            block_size=self._block_size,
            logits_rows=self._tensor(rows.logits_rows),
            features=self.features,
            num_candidates=self.num_candidates,
        )

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        tensor = torch.from_numpy(np.array(values, dtype=np.int64))
        return tensor if self._is_on_cpu else tensor.to(self._device)


def sequence_rows(sequences: Sequence[PlannedSequence], drafts: Sequence[Draft]) -> list[SequenceRows]:
    """The rows of each planned sequence that has any, as attention reads them."""
    return [
        SequenceRows(
            num_context=planned.start,
            num_rows=planned.num_tail + len(draft.token_ids),
            block_ids=planned.blocks,
            tree_mask=None if draft.parents is None or draft.is_chain else tree_mask(planned.num_tail, draft),
        )
        for planned, draft in zip(sequences, drafts, strict=True)
        if planned.num_tail
    ]


def tree_mask(num_tail: int, draft: Draft) -> Tensor:
    """[num_rows, num_rows] bool: tail rows are causal; a node sees the tail, its ancestors, itself."""
    num_rows = num_tail + len(draft)
    mask = np.tri(num_rows, dtype=bool)  # NumPy, since torch takes ten times as long for a row this short
    mask[num_tail:, num_tail:] = False
    for node in range(len(draft)):
        row, parent = num_tail + node, draft.parent(node)
        if parent >= 0:
            mask[row, num_tail:] = mask[num_tail + parent, num_tail:]
        mask[row, row] = True
    return torch.from_numpy(mask)
