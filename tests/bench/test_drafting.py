"""The costs of drafting, on one short generation."""

from __future__ import annotations

import pytest

from forerun.bench.drafting import measure_drafting
from tests.engines import tiny_llm

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def test_a_drafter_that_looks_back_finds_drafts(llm):
    cost = measure_drafting(llm.with_speculation(NGRAM), 1.0, num_tokens=24)
    assert cost.num_draft_tokens > 0
    assert cost.milliseconds_per_draft_token is not None


@pytest.mark.parametrize(
    "config",
    [
        {"method": "draft_model", "model": "tiny", "num_speculative_tokens": 3},
        {"method": "self", "exit_layer": 1, "num_speculative_tokens": 3},
    ],
    ids=lambda config: config["method"],
)
def test_a_drafter_with_a_model_is_charged_for_each_token_of_each_step(config):
    cost = measure_drafting(tiny_llm(config, max_model_len=192), 2.0, num_tokens=24)
    assert cost.num_draft_tokens > 2 * cost.num_steps  # three but near the end
    assert cost.draft_milliseconds_per_step == pytest.approx(
        cost.milliseconds_per_draft_token * cost.num_draft_tokens / cost.num_steps
    )
    assert cost.draft_token_share == pytest.approx(cost.milliseconds_per_draft_token / 2)


def test_the_step_of_the_prompt_is_not_counted(llm):
    assert measure_drafting(llm, 1.0, num_tokens=24).num_steps == 23


def test_without_drafts_there_is_no_time_per_drafted_token(llm):
    assert measure_drafting(llm, 1.0, num_tokens=8).milliseconds_per_draft_token is None
