"""What the measured generation counts."""

from __future__ import annotations

from forerun.bench.drafting import measure_drafting

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def test_a_drafter_that_looks_back_finds_drafts(llm):
    cost = measure_drafting(llm.with_speculation(NGRAM), num_tokens=24)
    assert cost.num_draft_tokens > 0
    assert cost.milliseconds_per_draft_token is not None


def test_the_step_of_the_prompt_is_not_counted(llm):
    assert measure_drafting(llm, num_tokens=24).num_steps == 23


def test_without_drafts_there_is_no_time_per_drafted_token(llm):
    assert measure_drafting(llm, num_tokens=8).milliseconds_per_draft_token is None
