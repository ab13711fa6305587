"""Trees of drafters that write all tokens in one pass: their branches share each depth's prediction, which a chain takes the best of."""

from __future__ import annotations

from collections import defaultdict

import pytest

from forerun import SamplingParams
from tests.contract.test_contract import PROMPTS, TIGHT
from tests.drafters.recording import recorded
from tests.engines import engine_of, tiny_llm

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
METHODS = ("pard", "peagle", "dflash")
WHOLE = 15


def drafts_of(method, *, num_prompts=8, engine=None, **settings):
    """The drafts of longest length, by text."""
    llm = tiny_llm({"method": method, "model": f"tiny-{method}", **settings}, **(engine or {}))
    seen = recorded(llm)
    llm.generate(PROMPTS[:num_prompts], GREEDY, use_tqdm=False)
    return llm, {tuple(text): draft for text, draft in seen}


def tokens_by_rank(draft):
    """At each depth the tokens by their rank among siblings: sets of one where all parents have the same children."""
    found = defaultdict(set)
    depths = draft.depths()
    for children in draft.children():
        for rank, child in enumerate(children):
            found[depths[child], rank].add(draft.token_ids[child])
    return found


@pytest.mark.parametrize("engine", [{}, TIGHT])
@pytest.mark.parametrize("method", METHODS)
def test_a_static_tree_ranks_the_predictions_that_a_chain_takes_the_best_of(method, engine):
    _, chains = drafts_of(method, num_speculative_tokens=3)
    llm, trees = drafts_of(method, draft_tree=[3, 2, 1], num_prompts=40 if engine else 8, engine=engine)
    assert (engine_of(llm).scheduler.num_preemptions > 0) == bool(engine)
    both = [text for text in chains.keys() & trees.keys() if (len(chains[text]), len(trees[text])) == (3, WHOLE)]
    assert len(both) > 40
    for text in both:
        found = tokens_by_rank(trees[text])
        assert len(found) == 3 + 2 + 1
        assert all(len(tokens) == 1 for tokens in found.values())
        assert [found[depth, 0] for depth in (1, 2, 3)] == [{token} for token in chains[text].token_ids]


@pytest.mark.parametrize("method", METHODS)
def test_a_dynamic_tree_is_as_deep_as_asked_and_costs_one_pass(method):
    llm = tiny_llm(
        {
            "method": method,
            "model": f"tiny-{method}",
            "num_speculative_tokens": 9,
            "draft_tree": {"top_k": 3, "depth": 4},
        }
    )
    seen, passes, num_passes = recorded(llm), engine_of(llm).drafting.drafter._passes, []
    forward = passes.forward
    passes.forward = lambda rows: num_passes.append(len(rows)) or forward(rows)
    llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
    drafts = [draft for _, draft in seen if draft.token_ids]
    assert len(num_passes) == len(drafts)
    assert max(len(draft) for draft in drafts) == 9
    assert max(draft.depth for draft in drafts) <= 4
    assert any(not draft.is_chain for draft in drafts)
