"""A grown tree is the best one: what brute force over all guesses finds."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.drafters.base import TargetInfo, VerifiedRows
from forerun.drafters.lookup.algorithms import PlainLookup
from forerun.drafters.lookup.drafter import LookupDrafter
from forerun.drafters.lookup.growing import grow
from forerun.drafters.lookup.guesses import COMPUTED, OWN, TABLE, Copy, Place, adjusted, place_at_end, take
from forerun.drafters.lookup.hit_rates import computed_class
from forerun.drafters.lookup.live_text import LiveText
from forerun.drafters.lookup.text_index import BREAK
from forerun.drafters.margins import margin_class
from forerun.ops.native.lookup import DraftLimits
from tests.drafters.texts import sequence

TARGET = TargetInfo(vocab_size=16, max_model_len=512, num_speculative_tokens=64)


def learnt(prompt: list[int], rows: list[tuple[int, int, list[int]]]) -> tuple[LookupDrafter, LiveText]:
    """A drafter that knows a table's rows, and a text."""
    drafter = LookupDrafter(TARGET, table_bytes=1 << 20, pool_bytes=0, lookup=PlainLookup())
    if rows:
        drafter.learn(
            VerifiedRows(
                token_ids=np.array([row[1] for row in rows]),
                previous_ids=np.array([row[0] for row in rows]),
                candidate_ids=np.array([row[2] for row in rows], dtype=np.int32),
                candidate_logits=np.tile(-np.arange(8, dtype=np.float32), (len(rows), 1)),
                salts=[(0, len(rows), None)],
            )
        )
    one = sequence(prompt)
    drafter.start(one)
    return drafter, drafter._texts[one.seq_id]


def all_paths(drafter: LookupDrafter, text: LiveText, place: Place, chance: float, depth: int, least: float):
    """(chance, path) of every path whose guesses all have a chance of `least` or more."""
    if not depth:
        return
    left = chance
    for guess in place.guesses():
        rate = adjusted(drafter.rates.rate(guess.guess_class), 1.0)
        if left * rate >= least:
            path = [*place.path, guess.token_id]
            yield left * rate, tuple(path)
            behind = Place(
                text, text.ending() + path, path, place.behind(guess.token_id), place.computed_behind(guess.token_id)
            )
            yield from all_paths(drafter, text, behind, left * rate, depth - 1, least)
        left *= 1.0 - rate


@settings(max_examples=80)
@given(
    prompt=st.lists(st.integers(0, 7), min_size=1, max_size=30),
    rows=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7), st.permutations(range(8))), max_size=12),
    max_nodes=st.integers(0, 12),
    max_depth=st.integers(0, 4),
    chain=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True), max_size=4),
)
def test_the_tree_has_the_likeliest_of_all_paths(prompt, rows, max_nodes, max_depth, chain):
    drafter, text = learnt(prompt, rows)
    text.guess(chain)
    tree = grow(text, DraftLimits(max_nodes, max_depth, 0.02), drafter.rates)
    paths: list[tuple[int, ...]] = []
    for token_id, parent in zip(tree.token_ids, tree.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token_id))
    known = {path: chance for chance, path in all_paths(drafter, text, place_at_end(text), 1.0, max_depth, 0.02)}
    assert [known[path] for path in paths] == list(tree.survival)
    assert list(tree.survival) == sorted(known.values(), reverse=True)[:max_nodes]


def test_guesses_at_one_place_share_its_chance():
    drafter, text = learnt([1, 2], [(1, 2, [3, 4, 5, 6, 7, 0, 1, 2])])
    tree = grow(text, DraftLimits(4, 1, 0.0), drafter.rates)
    left = 1.0
    for guess, chance in zip(place_at_end(text).guesses(), tree.survival, strict=True):
        rate = drafter.rates.rate(guess.guess_class)
        assert chance == pytest.approx(left * rate)
        left *= 1.0 - rate


def test_a_sequence_whose_guesses_fail_more_often_than_others_gets_lower_chances():
    drafter, text = learnt([1, 2, 3, 1, 2], [])
    before = grow(text, DraftLimits(2, 2, 0.0), drafter.rates)
    text.struct.hits, text.struct.expected = 0.0, 6.0
    after = grow(text, DraftLimits(2, 2, 0.0), drafter.rates)
    assert after.token_ids == before.token_ids
    assert after.survival[0] == pytest.approx(before.survival[0] * 0.4)


@pytest.mark.parametrize(("rate", "expected"), [(0.02, 0.025), (0.5, 0.556), (0.9, 0.918), (0.999, 0.995)])
def test_a_sequence_whose_guesses_stand_a_quarter_more_often_gets_chances_at_higher_odds(rate, expected):
    """Small chances are a quarter higher, and none comes near to 1 that was not."""
    assert adjusted(rate, 1.25) == pytest.approx(expected, abs=0.0005)


def test_a_computed_token_is_tried_first_and_only_once():
    _, text = learnt([1, 2], [(1, 2, [3, 4, 5, 6, 7, 0, 1, 2])])
    text.guess([[4], [9]])
    first = place_at_end(text)
    assert [guess.token_id for guess in first.guesses()] == [4, 3, 5, 6]
    assert first.guesses()[0].source == COMPUTED
    ending = [*text.ending(), 4]
    second = Place(text, ending, [4], first.behind(4), first.computed_behind(4))
    assert second.computed == 9
    assert Place(text, ending, [3], first.behind(3), first.computed_behind(3)).computed == BREAK


def test_a_chain_is_followed_along_the_text_until_that_leaves_it():
    drafter, text = learnt([1, 2], [])
    text.reserve(64)
    text.guess([[3], [4], [5]])
    take(text, [3], drafter.rates)
    assert place_at_end(text).computed == 4
    assert grow(text, DraftLimits(2, 2, 0.0), drafter.rates).token_ids == (4, 5)
    take(text, [7], drafter.rates)
    assert place_at_end(text).computed == BREAK


def test_rates_of_computed_tokens_are_learnt_by_depth_from_the_text():
    drafter, text = learnt([1], [])
    text.reserve(1024)
    for _ in range(60):
        text.guess([[2], [3]])
        take(text, [2, 9], drafter.rates)  # the first is right, the second never
    text.guess([[2], [3]])
    tree = grow(text, DraftLimits(2, 2, 0.0), drafter.rates)
    assert tree.survival[0] > 0.9
    second = Place(text, [2], [2], [Copy(), Copy()], 1).guesses()[0]
    assert drafter.rates.rate(second.guess_class) < 0.1


def test_rates_of_computed_tokens_are_learnt_by_their_margins():
    drafter, text = learnt([1], [])
    text.reserve(4096)
    for _ in range(120):
        text.guess([[2]], [0.1])
        take(text, [9], drafter.rates)
        text.guess([[2]], [3.5])
        take(text, [2], drafter.rates)
    of_margins = [
        [
            computed_class(0, margin_class(margin), copied, agreement)
            for copied, agreement in product(range(3), range(4))
        ]
        for margin in (0.1, 3.5)
    ]
    (wrong, of_wrong), (right, of_right) = (drafter.rates.counts[classes, :2].sum(axis=0) for classes in of_margins)
    assert wrong == 0.0 < 100 < of_wrong
    assert right == of_right > 100


def test_runners_up_come_after_copies_and_before_the_tables_candidates():
    _, text = learnt([1, 2, 7, 1, 2], [(1, 2, [3, 4, 5, 6, 7, 0, 1, 2])])
    text.guess([[4, 7, 8, 3], [9]])
    guesses = place_at_end(text).guesses()
    assert [guess.token_id for guess in guesses] == [4, 7, 8, 3, 5, 6]  # 7 is copied
    assert [guess.source for guess in guesses] == [COMPUTED, OWN, COMPUTED, COMPUTED, TABLE, TABLE]


def test_nothing_is_computed_behind_a_runner_up():
    drafter, text = learnt([1], [])
    text.reserve(64)
    text.guess([[2, 5], [3, 6]])
    first = place_at_end(text)
    assert Place(text, [1, 5], [5], first.behind(5), first.computed_behind(5)).guesses() == []
    take(text, [2], drafter.rates)
    assert [guess.token_id for guess in place_at_end(text).guesses()] == [3, 6]


def test_rates_of_runners_up_are_learnt_by_depth_and_rank():
    drafter, text = learnt([1], [])
    text.reserve(1024)
    for _ in range(60):
        text.guess([[2, 3, 4]])
        take(text, [4], drafter.rates)
    text.guess([[2, 3, 4]])
    chances = dict(zip(*grow(text, DraftLimits(3, 1, 0.0), drafter.rates)[::2], strict=True))
    assert chances[4] > 0.8 > 0.1 > max(chances[2], chances[3])


def test_a_chain_without_runners_up_leaves_none_of_the_one_before_it():
    _, text = learnt([1], [])
    text.guess([[2, 3, 4]])
    text.guess([[5]])
    assert [guess.token_id for guess in place_at_end(text).guesses()] == [5]
