"""N-gram drafts are what a naive scan of the text says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.drafters.confidence import confident_length
from forerun.drafters.ngram import LONGEST_MATCH, NgramConfig
from forerun.errors import ConfigError
from tests.drafters.texts import TARGET, assert_valid, propose, sequence, start_and_propose


def drafter(shortest: int, longest: int, *, threshold: float = 0.0):
    config = NgramConfig(prompt_lookup_min=shortest, prompt_lookup_max=longest, draft_confidence_threshold=threshold)
    return config.build(TARGET)


def scan(text: list[int], *, shortest: int, longest: int, num_tokens: int) -> tuple[int, ...]:
    """The definition: the latest earlier occurrence of the longest suffix, copied with overlap."""
    for length in range(longest, shortest - 1, -1):
        suffix = text[len(text) - length :]
        for place in range(len(text) - 1, length - 1, -1):
            if len(text) > length and text[place - length : place] == suffix:
                grown = list(text)
                for i in range(num_tokens):
                    grown.append(grown[place + i])
                return tuple(grown[len(text) :])
    return ()


texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


@settings(deadline=None, max_examples=300)
@given(
    prompt=texts,
    steps=st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=12),
    shortest=st.integers(1, 4),
    extra=st.integers(0, 3),
    num_tokens=st.integers(1, 8),
)
def test_incremental_index_drafts_what_a_naive_scan_finds(prompt, steps, shortest, extra, num_tokens):
    ngram = drafter(shortest, shortest + extra)
    growing = sequence(prompt)
    ngram.start(growing)
    for tokens in [[], *steps]:
        growing.output_ids.extend(tokens)
        draft = propose(ngram, growing, max_tokens=num_tokens)
        text = growing.tokens_from(0)
        assert draft.token_ids == scan(text, shortest=shortest, longest=shortest + extra, num_tokens=num_tokens)


@settings(deadline=None)
@given(prompt=texts, max_tokens=st.integers(1, 8), max_depth=st.integers(1, 8))
def test_drafts_are_valid_chains_within_both_limits(prompt, max_tokens, max_depth):
    draft = start_and_propose(drafter(1, 3), prompt, max_tokens=max_tokens, max_depth=max_depth)
    assert_valid(draft, max_tokens=max_tokens, max_depth=max_depth)
    assert draft.is_chain


def test_draft_is_what_followed_the_match():
    assert start_and_propose(drafter(2, 2), [1, 2, 3, 4, 5, 9, 1, 2], max_tokens=3).token_ids == (3, 4, 5)


def test_longer_match_beats_a_later_shorter_one():
    assert start_and_propose(drafter(1, 3), [7, 1, 2, 5, 9, 2, 6, 7, 1, 2], max_tokens=1).token_ids == (5,)


def test_latest_of_equally_long_matches_wins():
    assert start_and_propose(drafter(2, 2), [1, 2, 5, 1, 2, 6, 1, 2], max_tokens=1).token_ids == (6,)


@pytest.mark.parametrize("num_matching", [1, 2, 3, 4, 5])
def test_the_whole_match_decides_the_length_of_a_draft(num_matching):
    text = [7, 6, 5, 4, 3, *range(20, 32), *[7, 6, 5, 4, 3][5 - num_matching :]]
    draft = start_and_propose(drafter(1, 2, threshold=0.3), text, max_tokens=12)
    assert len(draft) == confident_length(num_matching, threshold=0.3, most=12)
    assert draft.token_ids == tuple(range(20, 20 + len(draft)))


def test_too_short_a_match_is_not_drafted_from():
    assert len(start_and_propose(drafter(1, 1, threshold=0.5), [1, 2, 3, 1])) == 0


def test_nothing_is_drafted_without_a_match():
    assert len(start_and_propose(drafter(2, 4), [1, 2, 3, 4, 5])) == 0


def test_match_shorter_than_the_minimum_is_no_match():
    assert len(start_and_propose(drafter(3, 3), [1, 2, 5, 1, 2])) == 0


def test_suffix_does_not_match_itself():
    assert len(start_and_propose(drafter(1, 3), [1])) == 0


def test_copy_that_reaches_the_end_goes_on_with_its_own_tokens():
    assert start_and_propose(drafter(2, 2), [8, 1, 2, 1, 2], max_tokens=5).token_ids == (1, 2, 1, 2, 1)


def test_match_may_overlap_the_suffix():
    assert start_and_propose(drafter(2, 2), [4, 4, 4], max_tokens=2).token_ids == (4, 4)


def test_match_may_span_prompt_and_output():
    ngram, growing = drafter(2, 2), sequence([9, 1], [2, 3, 1, 2])
    ngram.start(growing)
    assert propose(ngram, growing, max_tokens=1).token_ids == (3,)


def test_sequences_do_not_see_each_other():
    ngram, other = drafter(2, 2), sequence([1, 2, 3], seq_id=2)
    ngram.start(other)
    assert len(start_and_propose(ngram, [1, 2])) == 0


def test_stopped_sequence_leaves_nothing_behind():
    ngram, ended = drafter(1, 1), sequence([1, 2, 1])
    ngram.start(ended)
    ngram.stop(ended)
    assert len(start_and_propose(ngram, [1])) == 0


@pytest.mark.parametrize(
    ("given_bounds", "resolved"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_max": 4}, (4, 4)),
        ({"prompt_lookup_min": 2}, (2, 2)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)),
    ],
)
def test_unset_bound_mirrors_the_other(given_bounds, resolved):
    config = NgramConfig(**given_bounds)
    assert (config.shortest, config.longest) == resolved


@pytest.mark.parametrize(
    "bounds",
    [
        {"prompt_lookup_min": 4, "prompt_lookup_max": 2},
        {"prompt_lookup_min": 0},
        {"prompt_lookup_max": -1},
        {"prompt_lookup_max": 33},
        {"prompt_lookup_min": 33},
        {"prompt_lookup_max": 2.0},
        {"prompt_lookup_min": True},
        {"draft_confidence_threshold": 2},
    ],
)
def test_impossible_bounds_are_refused(bounds):
    with pytest.raises(ConfigError, match=next(iter(bounds))):
        NgramConfig(**bounds)


def test_the_longest_bound_is_as_far_as_a_match_is_measured():
    assert NgramConfig(prompt_lookup_min=LONGEST_MATCH, prompt_lookup_max=LONGEST_MATCH).longest == LONGEST_MATCH
    text = [*range(40), 50, *range(1, 40)]
    assert start_and_propose(drafter(LONGEST_MATCH, LONGEST_MATCH), text, max_tokens=1).token_ids == (50,)


def test_number_of_tokens_has_no_default():
    assert NgramConfig().default_num_speculative_tokens is None
