"""Suffix decoding drafts what its definition says, and its pools keep to themselves."""

from __future__ import annotations

import random
from sys import getsizeof

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from forerun.config.speculative_config import resolve_speculative
from forerun.drafters.suffix import BYTES_OF_A_RESPONSE, MAX_OCCURRENCES, OBJECTS_OF_A_POOL, ResponsePools, SuffixConfig
from forerun.drafters.suffix_tree import BREAK
from forerun.errors import ConfigError
from tests.drafters import naive_suffix
from tests.drafters.naive_suffix import followers
from tests.drafters.texts import TARGET, VOCAB_SIZE, assert_valid, propose, sequence, start_and_propose
from tests.memory import bytes_kept


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


def response_pools(*, max_responses=1000, max_tokens=10_000_000, max_bytes=1 << 30, vocab_size=VOCAB_SIZE):
    return ResponsePools(max_responses=max_responses, max_tokens=max_tokens, max_bytes=max_bytes, vocab_size=vocab_size)


def test_limit_on_responses_holds_over_all_salts():
    pools = response_pools(max_responses=2)
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
    pools = response_pools(max_tokens=max_tokens)
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


@pytest.mark.parametrize(
    ("max_bytes", "num_salts"),
    [
        (60_000, 30),
        (1_000_000, 1),
        pytest.param(60_000, 1, marks=pytest.mark.slow),
        pytest.param(1_000_000, 30, marks=pytest.mark.slow),
    ],
)
def test_real_memory_stays_within_the_budget_of_bytes(max_bytes, num_salts):
    source = random.Random(0)
    responses = [[source.randrange(50_000) for _ in range(source.choice([5, 300, 1000]))] for _ in range(300)]
    response_pools(vocab_size=50_000).add([1], "0")  # what is made at the first use is not the pools'
    with bytes_kept() as kept:
        pools = response_pools(max_bytes=max_bytes, vocab_size=50_000)
        for i, response in enumerate(responses):
            pools.add(response, str(i % num_salts))
            if i % 10 == 0:
                assert kept() - 4_000 <= pools.num_bytes <= max_bytes, "besides the pools and the loop's own objects"
    assert pools.num_bytes > max_bytes / 3
    assert pools.num_bytes == sum(
        pool.num_bytes + OBJECTS_OF_A_POOL + getsizeof(salt) for salt, pool in pools._pools.items()
    ) + BYTES_OF_A_RESPONSE * len(pools._responses)


@pytest.mark.parametrize("max_bytes", [0, 1000, 2500])
def test_a_budget_too_small_for_anything_keeps_nothing_and_works(max_bytes):
    pools = response_pools(max_bytes=max_bytes)
    pools.add([1, 2, 3] * 50, None)
    assert (pools.pool(None), pools.num_bytes, pools.num_tokens) == (None, 0, 0)


def test_a_salt_longer_than_the_budget_keeps_nothing_and_costs_nobody_else():
    pools = response_pools(max_bytes=20_000)
    pools.add([1, 2], "a")
    pools.add([1, 2], "b" * 30_000)
    assert pools.num_bytes <= 20_000
    assert pools.pool("b" * 30_000) is None
    assert pools.pool("a") is not None


class PoolsMachine(RuleBasedStateMachine):
    """Beside lists of responses: the latest that fit are kept, drop by drop, and saved and loaded they are the same."""

    salts = st.sampled_from([None, "a", "b"])

    def __init__(self):
        super().__init__()
        self.pools = response_pools(max_responses=5, max_tokens=25)
        self.kept: list[tuple[str | None, list[int]]] = []

    @rule(response=st.lists(st.integers(0, 2), max_size=30), salt=salts)
    def add(self, response, salt):
        self.pools.add(response, salt)
        if response:
            self.kept.append((salt, response[-25:]))
        while len(self.kept) > 5 or sum(len(text) for _, text in self.kept) > 25:
            self.kept.pop(0)

    @rule()
    def save_and_load(self):
        saved = self.pools.to_arrays()
        self.pools = response_pools(max_responses=5, max_tokens=25)
        self.pools.from_arrays(saved)

    @rule(salt=salts, gram=st.lists(st.integers(0, 2), min_size=3, max_size=3))
    def look_up(self, salt, gram):
        texts = [text for own, text in self.kept if own == salt]
        pool = self.pools.pool(salt)
        found = [] if pool is None else [pool.tokens[place] for place in pool.places(gram, limit=100)]
        # the place at the very end of a text is followed by a break, which is no continuation
        assert [token for token in found if token != BREAK] == followers(texts, tuple(gram))

    @invariant()
    def the_latest_that_fit_are_kept(self):
        assert self.pools.num_tokens == sum(len(text) for _, text in self.kept)
        for salt in (None, "a", "b"):
            texts = [text for own, text in self.kept if own == salt]
            pool = self.pools.pool(salt)
            expected = [token for text in texts for token in (*text, BREAK)]
            assert ([] if pool is None else pool.ended_texts().tolist()) == expected


PoolsMachine.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=25)
test_pools_agree_with_lists_of_responses = PoolsMachine.TestCase


@pytest.mark.parametrize(
    ("tokens", "ages", "dtype"),
    [
        ([1, 2], [0], np.int32),
        ([1, -1], [], np.int32),
        ([1, -1, 2, -1], [0], np.int32),
        ([VOCAB_SIZE, -1], [0], np.int32),
        ([-2, -1], [0], np.int32),
        ([1, -1], [0], np.float32),
        ([[1, -1]], [0], np.int32),
    ],
)
def test_arrays_that_no_pool_gives_are_refused_and_change_nothing(tokens, ages, dtype):
    pools = response_pools()
    good = {"tokens": np.array([1, -1], np.int32), "ages": np.array([0], np.int32)}
    bad = {"tokens": np.array(tokens, dtype), "ages": np.array(ages, dtype)}
    with pytest.raises(ValueError, match=r"agree|token ids|rows of int32"):
        pools.from_arrays({None: good, "a": bad})
    assert pools.num_tokens == 0


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


@pytest.mark.parametrize(("depth", "most"), [(12, 12), (200, 128)])
def test_default_number_of_tokens_is_the_tree_depth_as_far_as_drafts_may_be_so_long(depth, most):
    config = resolve_speculative({"method": "suffix", "suffix_decoding_max_tree_depth": depth})
    assert config.num_speculative_tokens == most
    resolve_speculative({"method": "suffix", "num_speculative_tokens": most})


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
