"""A drafter reads no more of unread texts in a step than the target may, and drafts for those that it has read."""

from __future__ import annotations

import pytest

from forerun import SamplingParams
from tests.drafters.recording import recorded
from tests.engines import VOCAB_SIZE, engine_of, tiny_drafter, tiny_llm

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
BUDGET = 32
NUM_TOKENS = 4
TWIN = {"method": "draft_model", "model": tiny_drafter(VOCAB_SIZE, noise=0.0), "num_speculative_tokens": NUM_TOKENS}
CASES = {
    "twin": TWIN,
    "eagle": {"method": "eagle", "model": "tiny-eagle", "num_speculative_tokens": NUM_TOKENS},
    "peagle": {"method": "peagle", "model": "tiny-peagle", "num_speculative_tokens": NUM_TOKENS},
    "dflash": {"method": "dflash", "model": "tiny-dflash", "num_speculative_tokens": NUM_TOKENS},
}


def long_prompt(first=1):
    return [(first + 7 * i) % VOCAB_SIZE for i in range(100)]


def limited(config):
    return tiny_llm(config, max_num_batched_tokens=BUDGET, max_num_seqs=4, enable_prefix_caching=False)


def entries_written_by_step(llm):
    """The number of the drafter's KV entries that each `propose` writes, in the list that is returned."""
    written, drafter = [], engine_of(llm).drafting.drafter
    propose, cache = drafter.propose, drafter._cache

    def spy(context):
        for layer in cache.layers:
            layer.key.zero_()
        drafts = propose(context)
        written.append(int((cache.layers[0].key != 0).flatten(1).any(1).sum()))
        return drafts

    drafter.propose = spy
    return written


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_no_step_reads_more_than_the_token_budget_and_its_own_drafts(config):
    llm = limited(config)
    written = entries_written_by_step(llm)
    llm.generate([long_prompt()], GREEDY, use_tqdm=False)
    assert max(written) <= BUDGET + 2 * (NUM_TOKENS + 1)


def test_a_sequence_that_is_not_read_yet_gets_no_draft_and_holds_up_nobody_else():
    llm = limited(TWIN)
    seen = recorded(llm)
    llm.generate([[1, 2, 3], long_prompt()], GREEDY, use_tqdm=False)
    short = [draft for text, draft in seen if text[:3] == (1, 2, 3)]
    long = [draft for text, draft in seen if text[:3] == tuple(long_prompt()[:3])]
    assert all(len(draft) > 0 for draft in short)
    assert [len(draft) for draft in long[:4]] == [0, 0, 0, NUM_TOKENS]


@pytest.mark.parametrize("num_prompts", [1, 4])
def test_a_twin_that_has_caught_up_is_always_right(num_prompts):
    llm = limited(TWIN)
    outputs = llm.generate([long_prompt(first) for first in range(num_prompts)], GREEDY, use_tqdm=False)
    assert all(output.speculation.acceptance_rate == 1.0 for output in outputs)
    assert all(output.speculation.num_accepted_tokens > 8 for output in outputs)


@pytest.mark.parametrize("config", [CASES[name] for name in ("eagle", "peagle", "dflash")])
def test_drafts_do_not_depend_on_how_many_steps_a_text_was_read_in(config):
    drafted = []
    for budget in (BUDGET, 2048):
        llm = tiny_llm(config, max_num_batched_tokens=budget, max_num_seqs=4)
        seen = recorded(llm)
        llm.generate([long_prompt()], GREEDY, use_tqdm=False)
        drafted.append({text: draft for text, draft in seen if draft.token_ids})
    both = drafted[0].keys() & drafted[1].keys()
    assert len(both) > 2
    assert all(drafted[0][text] == drafted[1][text] for text in both)
