"""Turns the rows of a step into the tensors that one forward pass reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.core.batch import ForwardBatch, SequenceRows
from forerun.engine.generation import Work


@dataclass(frozen=True, slots=True)
class Batch:
    """A forward pass and where each work's logits are.

    `first_rows[i]` is the row of the logits that follows the last committed token of work i, -1
    where there is none; `prompt_rows[i]` are the rows after each prompt token computed now, for
    works that want prompt logprobs.
    """

    forward: ForwardBatch
    first_rows: list[int]
    prompt_rows: list[range]


class Batcher:
    """Builds batches for one device and block size."""

    def __init__(self, *, block_size: int, device: torch.device, features: frozenset[str]) -> None:
        self._block_size = block_size
        self._device = device
        self._is_on_cpu = device.type == "cpu"
        self._features = features

    def build(self, works: Sequence[Work]) -> Batch:
        """Lay out every work's rows, one after the other, and choose the rows that need logits."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        rows: list[SequenceRows] = []
        logits_rows: list[int] = []
        first_rows: list[int] = []
        prompt_rows: list[range] = []
        for work in works:
            generation, draft, start = work.generation, work.draft, work.start
            first_token = len(token_ids)
            end = start + work.num_tail
            token_ids += generation.sequence.tokens_between(start, end)
            token_ids += draft.token_ids
            num_rows = len(token_ids) - first_token
            positions += range(start, start + num_rows) if draft.parents is None else _positions(work)
            slots += generation.slot.slots(start, num_rows)
            rows.append(
                SequenceRows(
                    num_context=start,
                    num_rows=num_rows,
                    block_ids=generation.slot.block_ids,
                    tree_mask=None if draft.is_chain else _tree_mask(work),
                )
            )
            num_prompt = _num_prompt_logits(work)
            prompt_rows.append(range(len(logits_rows), len(logits_rows) + num_prompt))
            logits_rows += range(first_token, first_token + num_prompt)
            reaches_end = work.reaches_end
            first_rows.append(len(logits_rows) if reaches_end else -1)
            if reaches_end:
                logits_rows += range(first_token + work.num_tail - 1, len(token_ids))
        forward = ForwardBatch(
            token_ids=self._tensor(token_ids),
            positions=self._tensor(positions),
            slot_mapping=self._tensor(slots),
            sequences=rows,
            block_size=self._block_size,
            logits_rows=self._tensor(logits_rows),
            features=self._features,
        )
        return Batch(forward, first_rows, prompt_rows)

    def _tensor(self, values: list[int]) -> Tensor:
        tensor = torch.from_numpy(np.array(values, dtype=np.int64))
        return tensor if self._is_on_cpu else tensor.to(self._device)


def _positions(work: Work) -> list[int]:
    """Positions of a work's rows; a draft's node at depth 1 stands right after the tail."""
    end = work.start + work.num_tail
    return [*range(work.start, end), *(end - 1 + depth for depth in work.draft.depths())]


def _tree_mask(work: Work) -> Tensor:
    """[num_rows, num_rows] bool: tail rows are causal; a node sees the tail, its ancestors, itself."""
    mask = torch.ones(work.num_rows, work.num_rows, dtype=torch.bool).tril()
    mask[work.num_tail :, work.num_tail :] = False
    for node in range(len(work.draft)):
        row = work.num_tail + node
        parent = work.draft.parent(node)
        if parent >= 0:
            mask[row, work.num_tail :] = mask[work.num_tail + parent, work.num_tail :]
        mask[row, row] = True
    return mask


def _num_prompt_logits(work: Work) -> int:
    """How many of the work's rows predict a prompt token whose logprob is wanted."""
    if not work.generation.wants_prompt_logits:
        return 0
    return min(work.start + work.num_tail, len(work.generation.sequence.prompt_ids) - 1) - work.start
