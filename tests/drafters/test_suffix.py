"""Suffix decoding drafts what its definition says, and its pools keep to themselves."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.drafters.suffix import MAX_OCCURRENCES, ResponsePools, SuffixConfig
from forerun.errors import ConfigError
from tests.drafters import naive_suffix
from tests.drafters.texts import TARGET, VOCAB_SIZE, assert_valid, propose, sequence, start_and_propose


def drafter(*, threshold=0.0, **keys):
    config = {f"suffix_decoding_{name}": value for name, value in keys.items()}
    return SuffixConfig(**config, draft_confidence_threshold=threshold).build(TARGET)


def with_past_responses(responses, *, salt=None, **keys):
    """A drafter that has seen these responses end."""
    suffix = drafter(**keys)
    for seq_id, response in enumerate(responses):
        ended = sequence([], response, seq_id=1000 + seq_id, salt=salt)
        suffix.start(ended)
        suffix.stop(ended)
    return suffix


texts = st.lists(st.integers(0, 2), max_size=15)  # four together have fewer places than MAX_OCCURRENCES
searches = st.fixed_dictionaries(
    {
        "depth": st.integers(1, 8),
        "factor": st.sampled_from([0.0, 0.5, 1.0, 1.5, 1e308]),
        "min_prob": st.sampled_from([0.0, 0.1, 0.34, 0.5, 1.0]),
        "threshold": st.sampled_from([0.0, 0.1, 0.25, 0.4, 0.7]),
        "is_tree": st.booleans(),
        "max_tokens": st.integers(0, 9),
        "max_depth": st.integers(0, 6),
    }
)


@settings(deadline=None, max_examples=300)
@given(prompt=texts, steps=st.lists(texts, max_size=3), pool=st.lists(texts, max_size=4), search=searches)
def test_draft_scores_what_the_definition_scores_best(prompt, steps, pool, search):
    suffix = with_past_responses(
        pool,
        max_tree_depth=search["depth"],
        max_spec_factor=search["factor"],
        min_token_prob=search["min_prob"],
        threshold=search["threshold"],
        tree=search["is_tree"],
    )
    growing = sequence(prompt)
    suffix.start(growing)
    for tokens in [[], *steps]:
        growing.output_ids.extend(tokens)
        draft = propose(suffix, growing, max_tokens=search["max_tokens"], max_depth=search["max_depth"])
        assert_valid(draft, max_tokens=search["max_tokens"], max_depth=search["max_depth"])
        found = naive_suffix.candidates(growing.tokens_from(0), pool, **search)
        expected = naive_suffix.best(found)
        if search["is_tree"]:  # sums in floating point may differ in the last bit between equal candidates
            parents = tuple(draft.parent(node) for node in range(len(draft)))
            scores = [one.score for one in found if (one.token_ids, one.parents) == (draft.token_ids, parents)]
            assert max(scores, default=0.0) == pytest.approx(expected.score)
        else:
            assert draft.token_ids == expected.token_ids


def test_most_frequent_continuation_is_drafted():
    assert start_and_propose(drafter(), [1, 2, 8, 1, 3, 9, 1, 2, 7, 1]).token_ids == (2,)


def test_longer_match_earns_a_longer_draft():
    draft = start_and_propose(drafter(), [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4])
    assert draft.token_ids == (5, 6, 7, 8)


def test_spec_factor_scales_what_a_match_earns():
    draft = start_and_propose(drafter(max_spec_factor=0.5), [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4])
    assert draft.token_ids == (5, 6)


def test_spec_factor_of_zero_drafts_nothing():
    assert len(start_and_propose(drafter(max_spec_factor=0.0), [1, 2, 1, 2, 1])) == 0


def test_match_and_draft_together_stay_within_the_tree_depth():
    assert len(start_and_propose(drafter(max_tree_depth=6), list(range(12)) + list(range(6)))) == 3


def test_path_below_the_least_probability_is_not_drafted():
    even_odds = [1, 2, 9, 1, 3, 9, 8, 1]
    assert len(start_and_propose(drafter(min_token_prob=0.6), even_odds)) == 0
    assert len(start_and_propose(drafter(min_token_prob=0.5), even_odds)) == 1


def test_what_was_seen_once_after_a_short_match_is_trusted_less_than_what_was_seen_often():
    once, often = [1, 2, 8, 9, 1], [1, 2, 8, 1, 2, 9, 1, 2, 7, 1]
    assert len(start_and_propose(drafter(threshold=0.5), once)) == 0
    assert start_and_propose(drafter(threshold=0.5), often).token_ids == (2,)


def test_of_equally_frequent_continuations_the_latest_is_drafted():
    assert start_and_propose(drafter(), [1, 2, 9, 1, 3, 8, 1]).token_ids == (3,)


def test_tree_drafts_alternatives_in_order_of_probability():
    prompt = [5, 1, 2, 5, 1, 2, 5, 1, 3, 5, 1]
    draft = start_and_propose(drafter(tree=True, max_spec_factor=1.5, max_tree_depth=3), prompt, max_tokens=2)
    assert draft.token_ids == (2, 3)
    assert draft.parents == (-1, -1)


def test_nothing_is_drafted_for_a_text_without_repeats():
    assert len(start_and_propose(drafter(), list(range(40)))) == 0


def test_past_response_is_continued_for_a_later_request():
    suffix = with_past_responses([[1, 2, 3, 4, 5, 6]])
    assert start_and_propose(suffix, [9, 1, 2, 3]).token_ids == (4, 5, 6)


def test_own_text_wins_over_the_pool_at_equal_score():
    suffix = with_past_responses([[1, 2, 7, 7, 7]])
    assert start_and_propose(suffix, [1, 2, 8, 9, 1, 2]).token_ids == (8, 9)


def test_drafts_do_not_run_from_one_response_into_the_next():
    suffix = with_past_responses([[1, 2, 3], [4, 5, 6]])
    assert start_and_propose(suffix, [1, 2]).token_ids == (3,)


def test_prompts_are_not_pooled():
    suffix = drafter()
    ended = sequence([1, 2, 3, 4, 5, 6], [7], seq_id=2)
    suffix.start(ended)
    suffix.stop(ended)
    assert len(start_and_propose(suffix, [1, 2, 3])) == 0


@pytest.mark.parametrize(("theirs", "ours"), [("a", "b"), ("a", None), (None, "a")])
def test_responses_of_another_salt_are_never_drafted(theirs, ours):
    suffix = with_past_responses([[1, 2, 3, 4]], salt=theirs)
    asking = sequence([1, 2], salt=ours)
    suffix.start(asking)
    assert len(propose(suffix, asking)) == 0


def test_responses_of_the_same_salt_are_shared():
    suffix = with_past_responses([[1, 2, 3, 4]], salt="a")
    asking = sequence([1, 2], salt="a")
    suffix.start(asking)
    assert propose(suffix, asking).token_ids == (3, 4)


@pytest.mark.parametrize("limit", ["max_cached_requests", "max_cached_tokens"])
def test_pool_of_no_responses_keeps_none(limit):
    suffix = with_past_responses([[1, 2, 3, 4]], **{limit: 0})
    assert len(start_and_propose(suffix, [1, 2])) == 0


def test_oldest_response_goes_first():
    suffix = with_past_responses([[1, 2, 3], [4, 5, 6], [7, 8, 9]], max_cached_requests=2)
    assert len(start_and_propose(suffix, [1, 2])) == 0
    assert start_and_propose(suffix, [4, 5]).token_ids == (6,)


def test_limit_on_responses_holds_over_all_salts():
    pools = ResponsePools(max_responses=2, max_tokens=100, vocab_size=VOCAB_SIZE)
    for salt in ("a", "b", "c"):
        pools.add([1, 2], salt)
    assert pools.pool("a") is None
    assert pools.pool("b") is not None


@settings(deadline=None)
@given(
    responses=st.lists(st.tuples(st.integers(0, 12), st.sampled_from([None, "a", "b"])), max_size=12),
    max_tokens=st.integers(0, 20),
)
def test_pools_hold_the_latest_responses_that_fit_the_token_budget(responses, max_tokens):
    pools = ResponsePools(max_responses=1000, max_tokens=max_tokens, vocab_size=VOCAB_SIZE)
    kept: list[tuple[int, str | None]] = []
    for length, salt in responses:
        pools.add([1] * length, salt)
        if length and max_tokens:
            kept.append((min(length, max_tokens), salt))
        while sum(length for length, _ in kept) > max_tokens:
            kept.pop(0)
    assert pools.num_tokens == sum(length for length, _ in kept)
    for salt in (None, "a", "b"):
        lengths = [length for length, own in kept if own == salt]
        pool = pools.pool(salt)
        assert (0 if pool is None else len(pool) - 1) == sum(lengths) + len(lengths)  # a break after each


def test_long_responses_cost_no_more_memory_than_the_token_budget_allows():
    budget, source = 5_000, random.Random(0)
    pools = ResponsePools(max_responses=10_000, max_tokens=budget, vocab_size=50_000)
    tracemalloc.start()
    for _ in range(40):
        pools.add([source.randrange(50_000) for _ in range(1_000)], None)
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes < 250 * budget


def test_of_a_response_longer_than_the_token_budget_the_end_is_kept():
    suffix = with_past_responses([[1, 2, 3, 4, 5, 6, 7]], max_cached_tokens=3)
    assert start_and_propose(suffix, [2, 3]).token_ids == ()
    assert start_and_propose(suffix, [5, 6]).token_ids == (7,)


@settings(deadline=None)
@given(responses=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=3, max_size=8), prompt=texts)
def test_evicted_responses_leave_exactly_the_counts_of_the_others(responses, prompt):
    full = with_past_responses(responses, max_cached_requests=2, min_token_prob=0.0, tree=True)
    fresh = with_past_responses(responses[-2:], max_cached_requests=2, min_token_prob=0.0, tree=True)
    assert start_and_propose(full, prompt) == start_and_propose(fresh, prompt)


def test_common_match_is_judged_by_its_latest_occurrences():
    old_habit, new_habit = [1, 2, 0] * (3 * MAX_OCCURRENCES), [1, 3, 0] * MAX_OCCURRENCES
    suffix = with_past_responses([old_habit + new_habit])
    assert start_and_propose(suffix, [9, 1]).token_ids == (3,)


def test_default_number_of_tokens_is_the_tree_depth():
    assert SuffixConfig(suffix_decoding_max_tree_depth=12).default_num_speculative_tokens == 12


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("suffix_decoding_max_tree_depth", 0),
        ("suffix_decoding_max_tree_depth", 2.0),
        ("suffix_decoding_max_cached_requests", -1),
        ("suffix_decoding_max_cached_tokens", -1),
        ("suffix_decoding_max_cached_tokens", 1e6),
        ("suffix_decoding_max_spec_factor", -0.1),
        ("suffix_decoding_max_spec_factor", float("inf")),
        ("suffix_decoding_min_token_prob", 1.5),
        ("suffix_decoding_min_token_prob", float("nan")),
        ("suffix_decoding_min_token_prob", "0.1"),
        ("suffix_decoding_tree", 1),
        ("draft_confidence_threshold", -1),
    ],
)
def test_value_out_of_range_is_refused(key, value):
    with pytest.raises(ConfigError, match=key):
        SuffixConfig(**{key: value})
