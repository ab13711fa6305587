"""Rows of a step as integers: places, positions, slots, and which logits are wanted."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.sampling_params import SamplingParams
from forerun.core.step import UNKNOWN_TOKEN, PlannedSequence, SequenceSpec, StepPlan, lay_out

CHAIN = Draft((50, 51))
TREE = Draft((50, 60, 51, 61), (-1, -1, 0, 1))
BLOCKS = np.array([7, 2, 5], dtype=np.int32)


def planned(start, num_tail, draft=NO_DRAFT, *, reaches_end=True, num_prompt_logits=0, blocks=BLOCKS):
    return PlannedSequence(
        seq_id=0,
        start=start,
        num_tail=num_tail,
        num_draft=len(draft),
        reaches_end=reaches_end,
        num_prompt_logits=num_prompt_logits,
        blocks=blocks,
    )


def rows_of(*sequences):
    """Rows of (planned, tail, draft) each."""
    return lay_out(*(list(column) for column in zip(*sequences, strict=True)), block_size=4)


def test_slots_follow_the_blocks_across_their_borders():
    rows = rows_of((planned(2, 4, CHAIN), [1, 2, 3, 4], CHAIN))
    assert rows.slots == [30, 31, 8, 9, 10, 11]
    assert rows.positions == [2, 3, 4, 5, 6, 7]


def test_sequences_are_packed_one_after_the_other():
    rows = rows_of((planned(5, 1, CHAIN), [9], CHAIN), (planned(0, 2), [3, 4], NO_DRAFT))
    assert rows.token_ids == [9, 50, 51, 3, 4]
    assert rows.first_rows == [0, 3]


def test_a_trees_node_stands_at_its_depth():
    assert rows_of((planned(4, 2, TREE), [4, 5], TREE)).positions == [4, 5, 6, 6, 7, 7]


def test_logits_are_wanted_from_the_last_committed_token_on_and_only_at_a_sequences_end():
    rows = rows_of(
        (planned(2, 4, reaches_end=False), [1, 2, 3, 4], NO_DRAFT),
        (planned(3, 3, CHAIN), [1, 2, 3], CHAIN),
        (planned(0, 2), [1, 2], NO_DRAFT),
    )
    assert rows.logits_rows == [6, 7, 8, 10]
    assert rows.first_logits == [-1, 0, 3]


def test_prompt_logprobs_take_the_rows_that_predict_a_prompt_token():
    rows = rows_of(
        (planned(0, 4, reaches_end=False, num_prompt_logits=4), [1, 2, 3, 4], NO_DRAFT),
        (planned(2, 3, num_prompt_logits=2), [1, 2, 3], NO_DRAFT),
        (planned(0, 1), [7], NO_DRAFT),
    )
    assert rows.logits_rows == [0, 1, 2, 3, 4, 5, 6, 7]
    assert rows.first_prompt_logits == [0, 4, 7]
    assert rows.first_logits == [-1, 6, 7]


def test_a_plan_survives_a_pipe():
    draft = Draft((UNKNOWN_TOKEN,) * 2)
    sequence = planned(5, 1, draft)
    spec = SequenceSpec(seq_id=0, prompt_ids=[1, 2], sampling=SamplingParams(stop="x", seed=3), seed=5, max_length=9)
    plan = StepPlan(sequences=[sequence], rows=rows_of((sequence, [UNKNOWN_TOKEN], draft)), block_size=4, new=[spec])
    copied = pickle.loads(pickle.dumps(plan))
    assert copied.rows == plan.rows
    assert copied.new == plan.new
    assert copied.sequences[0].blocks.tolist() == BLOCKS.tolist()


@pytest.mark.parametrize(
    ("num_output", "token_id", "ends"), [(1, 7, False), (2, 7, True), (2, 8, False), (4, 8, True), (1, 8, False)]
)
def test_a_sequence_ends_at_its_length_or_at_a_stop_token_past_min_tokens(num_output, token_id, ends):
    sampling = SamplingParams(min_tokens=2, max_tokens=4)
    spec = SequenceSpec(
        seq_id=0, prompt_ids=[1, 2], sampling=sampling, seed=0, max_length=6, stop_token_ids=frozenset({7})
    )
    assert spec.ends(num_output, token_id) == ends


@given(st.integers(0, 5), st.lists(st.integers(6, 8), min_size=1, max_size=4), st.integers(0, 4))
def test_a_quick_look_misses_no_end(num_output, token_ids, min_tokens):
    sampling = SamplingParams(min_tokens=min_tokens, max_tokens=6)
    spec = SequenceSpec(
        seq_id=0, prompt_ids=[1, 2], sampling=sampling, seed=0, max_length=8, stop_token_ids=frozenset({7})
    )
    ends = any(spec.ends(num_output + i, token_id) for i, token_id in enumerate(token_ids, 1))
    assert spec.may_end(num_output, token_ids) or not ends


def test_engine_and_plan_need_no_torch():
    code = "import sys, forerun.engine.engine, forerun.core.step; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
