"""Drafts of the recycling table: grown by chance, within their limits, learnt from what became of them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun import SamplingParams
from forerun.core.draft import NO_DRAFT
from forerun.core.sampling_params import SamplingParams as Params
from forerun.core.sequence import Sequence
from forerun.drafters.recycle import RecycleConfig
from forerun.drafters.recycle_rates import HitRates
from forerun.drafters.recycle_table import Found
from forerun.errors import ConfigError
from tests.contract.test_contract import PROMPTS
from tests.drafters.naive_recycle import verified
from tests.drafters.texts import TARGET, assert_valid, propose, sequence
from tests.engines import engine_of, tiny_llm

SURE, TORN = [20.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0, 0.0], [9.0, 9.0, 5.0, 4.0, 3.0, 2.0, 1.0, 1.0]
OTHERS = [40, 41, 42, 43, 44, 45]


def drafter(**keys):
    return RecycleConfig(**keys).build(TARGET)


def taught(rows, *, salt=None, **keys):
    """A drafter that has seen rows of (previous token, token, the two likeliest next tokens, logits)."""
    recycle = drafter(**keys)
    seen = [(previous, token, [*best, *OTHERS], logits) for previous, token, best, logits in rows]
    recycle.learn(verified(seen, [(0, len(seen), salt)]))
    return recycle


def drafted(recycle, prompt, *, salt=None, **limits):
    one = sequence(prompt, salt=salt)
    recycle.start(one)
    return propose(recycle, one, **limits)


def test_a_chain_of_sure_candidates_is_drafted_from_known_contexts():
    recycle = taught([(1, 2, (3, 9), SURE), (2, 3, (4, 9), SURE), (3, 4, (5, 9), SURE)], draft_confidence_threshold=0.2)
    draft = drafted(recycle, [7, 1, 2])
    assert (draft.token_ids, draft.parents, draft.source) == ((3, 4, 5), (-1, 0, 1), "recycle")


def test_a_tree_branches_where_the_target_was_torn():
    recycle = taught([(1, 2, (3, 4), TORN), (2, 3, (5, 9), SURE), (2, 4, (6, 9), SURE)], draft_confidence_threshold=0.1)
    draft = drafted(recycle, [1, 2], max_tokens=4)
    assert {(draft.token_ids[i], draft.parents[i]) for i in range(2)} == {(3, -1), (4, -1)}
    assert sorted(draft.token_ids) == [3, 4, 5, 6]


def test_without_trees_a_draft_is_the_likeliest_chain():
    rows = [(1, 2, (3, 4), TORN), (2, 3, (5, 9), SURE)]
    draft = drafted(taught(rows, recycle_tree=False, draft_confidence_threshold=0.1), [1, 2])
    assert (draft.token_ids, draft.parents) == ((3, 5), None)
    assert len(draft.survival) == 2


@pytest.mark.parametrize("prompt", [[5], [1, 5]])
def test_nothing_is_drafted_after_an_unknown_token(prompt):
    assert drafted(taught([(1, 2, (3, 4), SURE)]), prompt) == NO_DRAFT


def test_the_first_token_of_a_text_is_looked_up_alone():
    assert drafted(taught([(1, 2, (3, 4), SURE)]), [2]).token_ids[0] == 3


def test_salts_see_nothing_of_each_other():
    recycle = taught([(1, 2, (3, 4), SURE)], salt="a")
    assert drafted(recycle, [1, 2], salt="b") == NO_DRAFT
    assert drafted(recycle, [1, 2]) == NO_DRAFT
    assert len(drafted(recycle, [1, 2], salt="a")) > 0


def test_a_candidate_that_is_never_right_is_no_longer_drafted():
    recycle = taught([(1, 2, (3, 4), SURE)], draft_confidence_threshold=0.1)
    for seq_id in range(200):
        one = sequence([1, 2], seq_id=seq_id)
        recycle.start(one)
        draft = propose(recycle, one)
        one.output_ids += [30]
        propose(recycle, one)
        recycle.stop(one)
    assert draft == NO_DRAFT


def test_no_memory_means_no_drafts():
    assert drafted(taught([(1, 2, (3, 4), SURE)], recycle_max_bytes=0), [1, 2]) == NO_DRAFT


tokens = st.integers(0, 6)
candidates = st.permutations(range(7)).map(lambda order: [*order, 7])
rows = st.lists(st.tuples(tokens, tokens, candidates, st.sampled_from([SURE, TORN])), min_size=1, max_size=30)


@settings(deadline=None, max_examples=100)
@given(
    rows=rows,
    prompt=st.lists(tokens, min_size=1, max_size=5),
    tree=st.booleans(),
    max_tokens=st.integers(0, 12),
    max_depth=st.integers(0, 5),
)
def test_drafts_are_valid_and_come_in_falling_order_of_their_chance(rows, prompt, tree, max_tokens, max_depth):
    recycle = drafter(recycle_tree=tree, draft_confidence_threshold=0.0)
    recycle.learn(verified(rows))
    draft = drafted(recycle, prompt, max_tokens=max_tokens, max_depth=max_depth)
    assert_valid(draft, max_tokens=max_tokens, max_depth=max_depth)
    chances = draft.survival or ()
    assert len(chances) == len(draft)
    assert all(after <= before for before, after in pairwise((1.0, *chances, 0.0)))


@settings(deadline=None, max_examples=50)
@given(rows=rows, prompt=st.lists(tokens, min_size=2, max_size=5), num_tokens=st.integers(1, 6))
def test_the_first_nodes_of_a_draft_are_the_draft_of_that_size(rows, prompt, num_tokens):
    recycle = drafter(draft_confidence_threshold=0.0)
    recycle.learn(verified(rows))
    whole = drafted(recycle, prompt, max_tokens=12)
    assert drafted(recycle, prompt, max_tokens=num_tokens) == whole.first(num_tokens)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rates_become_the_shares_of_the_texts(temperature):
    rates, found = HitRates(), Found(2, (3, 4, 5), (0, 8, 30))
    for i in range(4000):
        rates.count(found, temperature, (3, 3, 4, 9)[i % 4])
    assert rates.chances(found, temperature) == pytest.approx([0.5, 0.25, 0.0], abs=0.03)


def test_a_temperature_that_is_greedy_to_the_rules_is_greedy_to_the_rates():
    rates, found = HitRates(), Found(2, (3, 4), (0, 8))
    rates.count(found, 9e-6, 4)
    assert rates.chances(found, 9e-6) == rates.chances(found, 0.0) != HitRates().chances(found, 0.0)


def test_rates_of_greedy_texts_sampled_texts_and_context_lengths_are_apart():
    rates = HitRates()
    before = rates.chances(Found(1, (3, 4), (0, 8)), 0.0)
    for _ in range(100):
        rates.count(Found(2, (3, 4), (0, 8)), 0.0, 3)
        rates.count(Found(1, (3, 4), (0, 8)), 1.0, 3)
    assert rates.chances(Found(1, (3, 4), (0, 8)), 0.0) == before


def test_only_places_that_the_text_came_to_are_counted():
    recycle = taught([(1, 2, (3, 9), SURE), (2, 3, (4, 9), SURE)], draft_confidence_threshold=0.0)
    counted = []
    recycle._rates.count = lambda found, _, token_id: counted.append((found.token_ids[0], token_id))
    one = sequence([1, 2])
    recycle.start(one)
    propose(recycle, one, max_tokens=3)
    one.output_ids += [3, 8, 1]
    propose(recycle, one, max_tokens=3)
    assert counted == [(3, 3), (4, 8)]


def test_a_greedy_request_learns_apart_from_a_sampled_one():
    recycle = taught([(1, 2, (3, 9), SURE)], draft_confidence_threshold=0.0)
    temperatures = []
    recycle._rates.count = lambda _, temperature, __: temperatures.append(temperature)
    for temperature in (0.0, 0.7):
        one = Sequence(
            seq_id=1,
            prompt_ids=[1, 2],
            output_ids=[],
            sampling=Params(temperature=temperature),
            seed=0,
            cache_salt=None,
        )
        recycle.start(one)
        propose(recycle, one)
        one.output_ids.append(3)
        propose(recycle, one)
    assert temperatures == [0.0, 0.7]


def test_an_answer_given_before_is_drafted_from_what_the_target_said_then():
    llm = tiny_llm({"method": "recycle"})
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    first, again = (llm.generate([PROMPTS[3]], greedy, use_tqdm=False)[0] for _ in range(2))
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert again.speculation.num_accepted_tokens > first.speculation.num_accepted_tokens
    assert again.speculation.acceptance_length > 2
    assert engine_of(llm).drafting.num_failures == 0


@pytest.mark.parametrize(
    "keys",
    [
        {"recycle_max_bytes": -1},
        {"recycle_max_bytes": True},
        {"recycle_max_bytes": 1e6},
        {"recycle_tree": 1},
        {"draft_confidence_threshold": 1.5},
        {"draft_confidence_threshold": "high"},
    ],
)
def test_impossible_settings_are_refused(keys):
    with pytest.raises(ConfigError, match=next(iter(keys))):
        RecycleConfig(**keys)
