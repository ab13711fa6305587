"""What "auto" drafts with."""

from __future__ import annotations

import pytest

from forerun.config.speculative_config import resolve_speculative
from forerun.core.sampling_params import SamplingParams
from forerun.errors import ConfigError
from tests.contract.drafters import BadDrafter
from tests.engines import storage, tiny_llm

PROMPT = {"prompt_token_ids": [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]}


def choices(config, **settings):
    return {choice.method: choice for choice in tiny_llm(config, **settings).drafter_choices()}


def test_it_says_what_it_uses_and_why_not_the_rest():
    found = choices({"method": "auto"})
    assert [method for method, choice in found.items() if choice.is_used] == ["copy", "pool", "recycle"]
    assert "in memory" in found["self"].why
    assert "drafter" in found["trained head"].why


def test_without_memory_it_copies_from_the_text_alone():
    found = choices({"method": "auto", "auto_memory": 0})
    assert [method for method, choice in found.items() if choice.is_used] == ["copy"]
    llm = tiny_llm({"method": "auto", "auto_memory": 0})
    llm.generate(PROMPT, SamplingParams(max_tokens=8), use_tqdm=False)
    lookup = llm.executor.drafting.drafter.lookup
    assert lookup.num_candidates == 0
    assert lookup.past_answers.num_bytes == 0


def test_a_drafter_of_the_users_own_is_used():
    found = choices({"method": "auto", "drafter": {"method": "draft_model", "model": "tiny"}})
    assert found["draft_model"].is_used


def test_another_method_chooses_nothing():
    with pytest.raises(ConfigError, match="it is 'auto' that chooses"):
        tiny_llm({"method": "ngram", "num_speculative_tokens": 2}).drafter_choices()


def test_a_failing_model_costs_its_drafts_only():
    class Failing(BadDrafter):
        def propose(self, context):
            raise RuntimeError("not today")

    llm = tiny_llm({"method": "auto", "drafter": {"method": Failing}})
    plain = tiny_llm().generate(PROMPT, SamplingParams(max_tokens=40), use_tqdm=False)[0]
    output = llm.generate(PROMPT, SamplingParams(max_tokens=40), use_tqdm=False)[0]
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    assert llm.stats.num_failed_drafts > 0


def test_hidden_states_are_not_saved_by_the_way():
    with pytest.raises(ConfigError, match="extract_hidden_states"):
        resolve_speculative("auto", storage())
