"""A walk over recorded texts: at every place the draft that an engine verifies there, token by token, and what it accepts."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from forerun.bench.draft_walk import WALKED_AT_ONCE, DraftWalk, EnginePace
from forerun.bench.recording import RecordedText, record
from forerun.core.draft import NO_DRAFT, Draft
from forerun.engine.costs import PRIOR
from forerun.engine.speculation import FixedLength
from forerun.errors import MemoryBudgetError
from forerun.plan.step_times import StepTimeModel
from tests.bench.verified_drafts import assert_same_drafts, pairs
from tests.contract.drafters import CASES
from tests.engines import engine_of, native_target, tiny_llm
from tests.native import needs_kernels

PROMPTS = {
    "words": [[7, 8, 9] * 4, [11, 12] * 9, [20, 21, 22, 23]],
    "others": [[30, 31] * 20, [40, 41, 42, 43, 44], [1, 2], [60, 61, 62] * 3],
}
NUM_TOKENS = 24
TRACED = [
    *("draft-model", "draft-model-coupled", "draft-model-tree", "draft-model-dynamic-tree", "draft-model-foreign"),
    *("pard", "pard-tree", "eagle", "eagle-tree", "eagle3", "eagle3-dynamic-tree", "peagle", "peagle-dynamic-tree"),
    *("medusa", "medusa-tree", "mlp-speculator", "dflash", "dflash-coupled", "mtp", "self-exit", "ngram"),
]


@functools.cache
def recorded(target=None, temperature=0.0):
    """The answers of a target."""
    return record(tiny_llm(target=target), PROMPTS, max_tokens=NUM_TOKENS, temperatures=(temperature,))


def compare(config, target, *, temperature=0.0, batch_size=3, **settings):
    """Hold a walk to an engine's run; return how many draft tokens stood in all.

    `config` is a speculative_config or the name of one in `CASES`.
    """
    config = CASES.get(config, config) if isinstance(config, str) else config
    walked, engine = (
        tiny_llm(config, target=target, verifies_all=True, **{"max_num_seqs": WALKED_AT_ONCE} | settings)
        for _ in range(2)
    )
    return assert_same_drafts(walked, engine, recorded(target, temperature), batch_size=batch_size)


@needs_kernels
@pytest.mark.parametrize("name", TRACED)
def test_a_walk_drafts_what_an_engine_verifies_and_accepts_to_the_bit(name):
    num_stood = compare(name, native_target(torch.bfloat16))
    assert num_stood > 0 or name not in ("draft-model", "draft-model-tree", "pard", "self-exit", "ngram")


@needs_kernels
@pytest.mark.parametrize("name", ["draft-model", "eagle3", "medusa", "mtp"])
def test_a_walk_drafts_what_an_engine_verifies_and_accepts_in_fp32(name):
    compare(name, native_target(torch.float32))


@needs_kernels
@pytest.mark.parametrize("name", ["draft-model-coupled", "dflash-coupled", "eagle3", "self-exit"])
def test_a_walk_over_sampled_texts_draws_with_the_noise_of_their_requests(name):
    num_stood = compare(name, native_target(), temperature=1.0)
    assert num_stood > 0 or name == "eagle3", "a random head is never right"


@needs_kernels
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("eagle3", {"block_size": 1}),
        ("draft-model-tree", {"block_size": 16, "max_num_batched_tokens": 16}),
        ("self-exit", {"block_size": 16, "max_num_batched_tokens": 16}),
    ],
)
def test_neither_blocks_nor_chunks_nor_budgets_change_what_a_walk_drafts(name, settings):
    compare(name, native_target(), batch_size=1, **settings)


@pytest.mark.parametrize("name", ["draft-model", "eagle3", "self-exit", "hybrid"])
def test_in_torch_a_walk_drafts_what_an_engine_verifies_too(name):
    compare(name, None, batch_size=1)


@needs_kernels
def test_what_a_draft_writes_into_the_targets_own_cache_is_undone_before_the_next_place():
    """The copies leave places out for which the first layers' KV must still be the target's, not that of older drafts."""
    config = {
        "method": "hybrid",
        "num_speculative_tokens": 6,
        "drafters": [
            {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "min_draft_tokens": 4},
            {"method": "self", "exit_layer": 2},
        ],
    }
    compare(config, native_target(), batch_size=1, block_size=16)


def test_a_drafter_that_remembers_meets_one_text_after_the_other():
    """Else what it drafts would depend on how many texts are walked at once."""
    assert DraftWalk(llm=tiny_llm(CASES["hybrid"]))._num_at_once == 1
    assert DraftWalk(llm=tiny_llm(CASES["draft-model"]))._num_at_once == WALKED_AT_ONCE


def test_a_walk_leaves_no_block_taken_and_no_sequence_started():
    llm = tiny_llm(CASES["eagle"], max_num_seqs=WALKED_AT_ONCE)
    free = engine_of(llm).pool.num_free
    list(DraftWalk(llm=llm).drafts(pairs(recorded())))
    assert engine_of(llm).pool.num_free == free
    assert not engine_of(llm).drafting._started


def test_texts_beyond_the_memory_are_refused():
    walk = DraftWalk(llm=tiny_llm(CASES["eagle"], max_num_seqs=WALKED_AT_ONCE, num_gpu_blocks_override=33))
    with pytest.raises(MemoryBudgetError, match="do not hold 7 texts"):
        list(walk.drafts(pairs(recorded())))


STEP_TIMES = StepTimeModel([0.2, 0.1, *[0.0] * (len(PRIOR) - 2), 0.0, 0.0])  # of a step: 0.2 s, and 0.1 s for each row


def paced(num_places, *, draft, draft_seconds, answer=(7,) * 64, num_speculative_tokens=8):
    """The clock of a walk over so many places with the same draft, and the real seconds in it."""
    now = 5.0
    pace = EnginePace(FixedLength(num_speculative_tokens=num_speculative_tokens), STEP_TIMES, clock=lambda: now)
    text = RecordedText(
        kind="a",
        temperature=0.0,
        prompt_ids=[1],
        answer_ids=list(answer),
        candidate_ids=np.zeros((len(answer), 1), dtype=np.int32),
        candidate_logprobs=np.zeros((len(answer), 1), dtype=np.float32),
    )
    for place in range(1, 1 + num_places):
        now += draft_seconds
        pace.pass_place(draft, text, place, draft_seconds=draft_seconds)
    return pace() - 5.0


@pytest.mark.parametrize("draft_seconds", [0.0, 0.05])
def test_a_walk_takes_as_long_as_the_steps_and_drafts_that_an_engine_needs_for_its_places(draft_seconds):
    plain = paced(12, draft=NO_DRAFT, draft_seconds=draft_seconds)
    assert plain == pytest.approx(12 * (0.3 + draft_seconds))
    right = paced(12, draft=Draft((7, 7, 7)), draft_seconds=draft_seconds)  # in three steps of four rows
    assert right == pytest.approx(3 * (0.6 + draft_seconds))
    wrong = paced(12, draft=Draft((8, 7, 7)), draft_seconds=draft_seconds)
    assert wrong == pytest.approx(12 * (0.6 + draft_seconds))


def test_a_walks_pace_follows_a_change_of_the_text_within_some_hundred_places():
    answer = [7] * 600 + [9] * 600
    before, both = (paced(places, draft=Draft((7, 7, 7)), draft_seconds=0.0, answer=answer) for places in (590, 1190))
    assert before == pytest.approx(590 / 4 * 0.6)
    assert 600 * 0.6 * 0.85 < both - before < 600 * 0.6
