"""Rows, positions, places and masks of a forward pass."""

from __future__ import annotations

import torch
from forerun.engine.batcher import Batcher

from forerun.core.draft import Draft
from forerun.engine.generation import Work
from forerun.kv.block_pool import BlockPool
from tests.engine.generations import BLOCK, generation_of

CHAIN = Draft((50, 51))
TREE = Draft((50, 60, 51, 61), (-1, -1, 0, 1))


def build(*wanted):
    """A batch of works; each is (prompt, start, num_tail, draft, sampling settings)."""
    pool = BlockPool(32, enable_prefix_caching=False)
    works = []
    for prompt, start, num_tail, draft, settings in wanted:
        generation = generation_of(pool, prompt, **settings)
        generation.slot.allocate(start + num_tail + len(draft))
        generation.slot.commit(list(prompt)[:start])
        works.append(Work(generation, start, num_tail, draft))
    batcher = Batcher(block_size=BLOCK, device=torch.device("cpu"), features=frozenset({"hidden"}))
    return batcher.build(works), works


def test_rows_of_all_sequences_are_packed_one_after_the_other():
    batch, works = build((range(6), 5, 1, CHAIN, {}), (range(10, 19), 2, 4, Draft(), {}))
    forward = batch.forward
    assert forward.token_ids.tolist() == [5, 50, 51, 12, 13, 14, 15]
    assert forward.positions.tolist() == [5, 6, 7, 2, 3, 4, 5]
    assert forward.slot_mapping.tolist() == [
        *works[0].generation.slot.slots(5, 3),
        *works[1].generation.slot.slots(2, 4),
    ]
    assert [(rows.num_context, rows.num_rows) for rows in forward.sequences] == [(5, 3), (2, 4)]
    assert forward.features == {"hidden"}


def test_logits_are_computed_from_the_last_committed_token_on_and_only_at_a_sequences_end():
    batch, _ = build((range(9), 2, 4, Draft(), {}), (range(6), 3, 3, CHAIN, {}), (range(2), 0, 2, Draft(), {}))
    assert batch.forward.logits_rows.tolist() == [6, 7, 8, 10]
    assert batch.first_rows == [-1, 0, 3]


def test_a_chain_needs_no_mask():
    batch, _ = build((range(6), 5, 1, CHAIN, {}), (range(6), 5, 1, Draft((50, 51), (-1, 0)), {}))
    assert [rows.tree_mask for rows in batch.forward.sequences] == [None, None]


def test_a_trees_node_stands_at_its_depth_and_sees_its_ancestors():
    batch, _ = build((range(6), 4, 2, TREE, {}))
    assert batch.forward.positions.tolist() == [4, 5, 6, 6, 7, 7]
    (rows,) = batch.forward.sequences
    seen = [[column for column in range(6) if rows.tree_mask[row, column]] for row in range(6)]
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 2, 4], [0, 1, 3, 5]]


def test_prompt_logprobs_take_the_rows_that_predict_a_prompt_token():
    wants = {"prompt_logprobs": 1}
    batch, _ = build((range(9), 0, 4, Draft(), wants), (range(5), 2, 3, Draft(), wants), ([7], 0, 1, Draft(), wants))
    assert batch.prompt_rows == [range(4), range(4, 6), range(7, 7)]
    assert batch.forward.logits_rows.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert batch.first_rows == [-1, 6, 7]


def test_siblings_leave_prompt_logprobs_to_the_first():
    batch, _ = build((range(5), 0, 5, Draft(), {"prompt_logprobs": 1, "index": 1}))
    assert batch.prompt_rows == [range(0)]
