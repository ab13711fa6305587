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


def make_builder():
    return BatchBuilder(
        block_size=BLOCK, device=torch.device("cpu"), features=frozenset({"hidden"}), num_candidates=3, vocab_size=9
    )


def build(*wanted, builder=None):
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
    return (builder or make_builder()).build(planned, rows, drafts)


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


def test_steps_of_as_many_rows_take_turns_in_one_memory():
    builder = make_builder()
    first = build((5, [5], CHAIN), builder=builder)
    build((5, [5], NO_DRAFT), builder=builder)
    again = build((7, [8], Draft((60, 61))), builder=builder)
    assert again.token_ids.data_ptr() == first.token_ids.data_ptr()
    assert again.token_ids.tolist() == [8, 60, 61]
    assert again.positions.tolist() == [7, 8, 9]
    assert again.slot_mapping.tolist() == [7, 8, 9]
    assert again.logits_rows.tolist() == [0, 1, 2]
    part = build((2, [12, 13, 14], NO_DRAFT), builder=builder)
    assert part.logits_rows.tolist() == [2], "as many rows, of which fewer are judged"


def test_logits_of_any_number_of_rows_have_one_memory_which_grows():
    builder = make_builder()
    few, many = (build((5, [5], draft), builder=builder).logits for draft in (NO_DRAFT, TREE))
    fewer = build((5, [5], CHAIN), builder=builder).logits
    assert [list(logits.shape) for logits in (few, many, fewer)] == [[1, 9], [5, 9], [3, 9]]
    assert fewer.data_ptr() == many.data_ptr()


def test_trees_of_other_shapes_have_masks_of_their_own():
    builder = make_builder()
    trees = [Draft((50, 60, 70), parents) for parents in ((-1, -1, 0), (-1, 0, 0), (-1, -1, 0))]
    masks = [build((5, [5], tree), builder=builder).sequences[0].tree_mask.tolist() for tree in trees]
    assert masks[0] == masks[2] != masks[1]


def test_a_wide_tree_and_one_behind_several_rows_have_masks_too():
    wide = Draft(tuple(range(35)), (-1,) * 35)
    (rows,) = build((0, [5], wide)).sequences
    assert torch.equal(rows.tree_mask[1:, 1:], torch.eye(35, dtype=torch.bool))
    (rows,) = build((0, [5, 6, 7], TREE)).sequences
    assert rows.tree_mask.shape == (7, 7)
