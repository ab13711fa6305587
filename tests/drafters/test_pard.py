"""A draft model that writes all tokens in one pass: each is what the model says after the text and so many masks."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from forerun import SamplingParams
from forerun.errors import ConfigError, ModelError
from forerun.models.config_file import read_config
from forerun.models.loader import load_model
from forerun.models.tokenizer import load_tokenizer
from forerun.models.vocabulary_map import map_vocabulary
from tests.contract.test_contract import PROMPTS, TIGHT
from tests.drafters.recording import recorded, recorded_under_pressure
from tests.engines import (
    VOCAB_SIZE,
    engine_of,
    foreign_drafter,
    native_target,
    pard_drafter,
    tiny_llm,
    tiny_target,
    with_config,
)
from tests.foreign import few_tokens
from tests.models.paged_run import PagedRun
from tests.native import needs_kernels

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=5, max_tokens=20, ignore_eos=True)
K, MASK = 5, 11


def pard(noise=0.1, **settings):
    """A config over the target's model with its matrices disturbed; with no noise it is the target's twin."""
    model = str(pard_drafter(VOCAB_SIZE, noise))
    return {"method": "pard", "model": model, "num_speculative_tokens": K, **settings}


@functools.cache
def drafter_model():
    return load_model(pard_drafter(VOCAB_SIZE), dtype=torch.float32, device=torch.device("cpu"))


def computed_anew(text, count):
    """What the drafter's model says after a whole text and `count` - 1 masks."""
    rows = range(len(text) - 1, len(text) + count - 1)
    logits = PagedRun(drafter_model()).feed([*text, *[MASK] * (count - 1)], logits_rows=rows).logits
    return logits.argmax(-1).tolist()


def assert_computed_anew(seen, *, least):
    """The drafts are those, whatever the engine had done with their sequences before."""
    checked = 0
    for text, draft in seen[:: max(1, len(seen) // 40)]:
        if draft.token_ids:
            assert list(draft.token_ids) == computed_anew(text, len(draft)), text
            checked += len(draft)
    assert checked >= least


def test_drafts_are_those_of_one_pass_over_text_and_masks():
    llm = tiny_llm(pard())
    seen = recorded(llm)
    llm.generate(PROMPTS[:8], GREEDY, use_tqdm=False)
    assert_computed_anew(seen, least=80)


def test_also_after_prefix_hits_preemption_and_chunks():
    llm = tiny_llm(pard(), **TIGHT)
    seen = recorded_under_pressure(llm, PROMPTS[:16], GREEDY)
    assert_computed_anew(seen, least=80)


def test_also_where_a_long_prompt_is_read_in_parts(monkeypatch):
    monkeypatch.setattr("forerun.drafters.neural.forward.MAX_TEXT_ROWS", 7)
    llm = tiny_llm(pard())
    seen = recorded(llm)
    llm.generate(PROMPTS[:4], GREEDY, use_tqdm=False)
    assert_computed_anew(seen, least=80)


def test_requests_that_want_fewer_tokens_get_fewer_masks():
    llm = tiny_llm(pard())
    seen = recorded(llm)
    sampling = [
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, speculation=speculation)
        for speculation in ({"num_speculative_tokens": 2}, None, {"num_speculative_tokens": 1})
    ]
    llm.generate(PROMPTS[:3], sampling, use_tqdm=False)
    assert {len(draft) for _, draft in seen} >= {1, 2, K}
    assert_computed_anew(seen, least=30)


def test_a_draft_takes_one_pass():
    llm = tiny_llm(pard())
    seen, passes = recorded(llm), engine_of(llm).drafting.drafter._passes
    forward, num_passes = passes.forward, 0

    def counting(rows):
        nonlocal num_passes
        num_passes += 1
        return forward(rows)

    passes.forward = counting
    llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
    drafts = [draft for _, draft in seen if draft.token_ids]
    assert num_passes == len(drafts) > 3


def first_is_always_right(llm, sampling, prompts=PROMPTS[:12]):
    """Whether a twin's first token, which no mask stands before, is accepted in each draft."""
    llm.generate(prompts, sampling, use_tqdm=False)
    counts = llm.stats.speculation
    assert counts.num_drafts > 60
    return counts.acceptance_per_position[0] == 1.0 > counts.acceptance_per_position[1]


@pytest.mark.parametrize(("block_size", "num_tokens"), [(1, 2), (3, 5), (4, 17), (16, 5)])
def test_the_twins_first_token_is_right_at_any_block_size_and_length_of_draft(block_size, num_tokens):
    assert first_is_always_right(tiny_llm(pard(0.0, num_speculative_tokens=num_tokens), block_size=block_size), GREEDY)


def test_the_twins_first_token_is_right_where_sequences_are_preempted_and_prompts_chunked():
    llm = tiny_llm(pard(0.0), **TIGHT)
    assert first_is_always_right(llm, GREEDY, PROMPTS[:16])
    assert engine_of(llm).scheduler.num_preemptions > 0


def test_a_coupled_twins_first_token_is_what_the_target_draws():
    assert first_is_always_right(tiny_llm(pard(0.0, draft_sample_method="coupled")), SAMPLED)


@pytest.mark.parametrize("method", ["standard", "block"])
def test_a_twins_first_token_is_never_rejected_by_its_probabilities(method):
    config = pard(0.0, draft_sample_method="probabilistic", rejection_sample_method=method)
    assert first_is_always_right(tiny_llm(config), SAMPLED)


@needs_kernels
def test_on_the_kernels_in_bf16_too():
    config = pard(model=str(pard_drafter(264, 0.0)))
    assert first_is_always_right(tiny_llm(config, target=native_target()), GREEDY)


def drafts_of(config, **settings):
    llm = tiny_llm(config, **settings)
    seen = recorded(llm)
    llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False)
    return seen


def test_a_model_of_other_tokens_reads_its_own_mask():
    folder, tokenizer = foreign_drafter(VOCAB_SIZE, noise=0.0, num_missing=0), few_tokens()
    theirs = load_tokenizer(folder).vocabulary(read_config(folder).vocab_size)
    vocabulary_map = map_vocabulary(tokenizer.vocabulary(VOCAB_SIZE), theirs, vocab_size=VOCAB_SIZE)
    own_mask = int(vocabulary_map.read_ids[MASK])
    assert own_mask != MASK
    foreign = pard(model=str(with_config(folder, {"pard_token": own_mask})), use_heterogeneous_vocab=True)
    target = replace(tiny_target(), tokenizer=tokenizer)
    assert drafts_of(foreign, target=target) == drafts_of(pard(0.0))


def test_vllms_spelling_is_the_same():
    assert drafts_of(pard(method="draft_model", parallel_drafting=True)) == drafts_of(pard())


def test_beyond_its_own_maximum_it_drafts_nothing():
    llm = tiny_llm(pard(max_model_len=30))
    seen = recorded(llm)
    sampling = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    llm.generate([[1, 2, 3]], sampling, use_tqdm=False)
    assert max(len(text) + len(draft) for text, draft in seen if draft.token_ids) == 30


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parallel_drafting": False}, "got False with method 'pard'; leave it out, or say 'draft_model'"),
        ({"parallel_drafting": "yes"}, "parallel_drafting: got 'yes'; may be True or False"),
        ({"draft_tree": [2, 2]}, "draft_tree: has 6 nodes, num_speculative_tokens allows 5"),
        ({"num_speculative_tokens": None}, "method 'pard' has no default"),
    ],
)
def test_a_wrong_setting_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        tiny_llm(pard(**settings))


@pytest.mark.parametrize("token_id", [97, -1, "11", True])
def test_a_mask_that_is_no_token_is_refused(token_id):
    model = str(pard_drafter(VOCAB_SIZE, pard_token=token_id))
    with pytest.raises(ModelError, match=r"pard_token: got .*; must be a token id from 0 to 96"):
        tiny_llm(pard(model=model))


@pytest.mark.parametrize("method", ["pard", "draft_model"])
def test_a_model_without_a_mask_token_is_refused(method):
    config = pard(method=method, model="tiny", parallel_drafting=True)
    with pytest.raises(ModelError, match="has none of mask_token_id, pard_token, ptd_token_id"):
        tiny_llm(config)
