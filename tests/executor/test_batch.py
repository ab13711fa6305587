"""Tensors and masks of a forward pass, made of a plan's integers."""

from __future__ import annotations

import numpy as np
import torch

from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.step import PlannedSequence, lay_out
from forerun.executor.batch import BatchBuilder

BLOCK = 4
CHAIN = Draft((50, 51))
TREE = Draft((50, 60, 51, 61), (-1, -1, 0, 1))


def build(*wanted):
    """A batch of sequences in blocks of their own; each is (start, tail, draft)."""
    planned = [
        PlannedSequence(
            seq_id=i,
            start=start,
            num_tail=len(tail),
            num_draft=len(draft),
            reaches_end=True,
            blocks=np.arange(10 * i, 10 * i + 10, dtype=np.int32),
        )
        for i, (start, tail, draft) in enumerate(wanted)
    ]
    drafts = [draft for _, _, draft in wanted]
    rows = lay_out(planned, [tail for _, tail, _ in wanted], drafts, block_size=BLOCK)
    builder = BatchBuilder(
        block_size=BLOCK, device=torch.device("cpu"), features=frozenset({"hidden"}), num_candidates=3, vocab_size=9
    )
    return builder.build(planned, rows, drafts)


def test_tensors_hold_the_rows_of_all_sequences():
    batch = build((5, [5], CHAIN), (2, [12, 13, 14, 15], NO_DRAFT))
    assert batch.token_ids.tolist() == [5, 50, 51, 12, 13, 14, 15]
    assert batch.positions.tolist() == [5, 6, 7, 2, 3, 4, 5]
    assert batch.slot_mapping.tolist() == [5, 6, 7, 42, 43, 44, 45]
    assert batch.logits_rows.tolist() == [0, 1, 2, 6]
    assert [(rows.num_context, rows.num_rows) for rows in batch.sequences] == [(5, 3), (2, 4)]
    assert batch.features == {"hidden"}
    assert batch.num_candidates == 3


def test_a_chain_needs_no_mask():
    batch = build((5, [5], CHAIN), (5, [5], Draft((50, 51), (-1, 0))))
    assert [rows.tree_mask for rows in batch.sequences] == [None, None]


def test_a_trees_node_sees_the_tail_and_its_ancestors():
    (rows,) = build((4, [4, 5], TREE)).sequences
    seen = [[column for column in range(6) if rows.tree_mask[row, column]] for row in range(6)]
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 2, 4], [0, 1, 3, 5]]


def test_a_sequence_without_rows_is_left_out():
    batch = build((5, [], NO_DRAFT), (2, [12], NO_DRAFT))
    assert [rows.num_context for rows in batch.sequences] == [2]
