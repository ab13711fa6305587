"""Rates start at a prior and come to what is counted."""

from __future__ import annotations

import random
from itertools import product

import pytest

from forerun.drafters.lookup.hit_rates import (
    AFTER_COMPUTED,
    FIRST_RUNNER_UP,
    LENGTHS,
    MOST_RUNNERS_UP,
    NUM_CLASSES,
    NUM_COPY_CLASSES,
    NUM_DEPTH_CLASSES,
    NUM_LOOK_UP_CLASSES,
    HitRates,
    candidate_class,
    computed_class,
    copy_class,
    runner_up_class,
)
from forerun.drafters.margins import NUM_MARGIN_CLASSES, margin_class


def test_each_class_has_a_number_of_its_own():
    copies = [
        copy_class(source, length, agreement, after_computed=after)
        for source, length, agreement, after in product(range(2), LENGTHS, range(4), (False, True))
    ]
    tables = [
        candidate_class(length, decile / 10 + 0.05, after=after)
        for length, decile, after in product((1, 2), range(10), range(3))
    ]
    kinds = range(NUM_DEPTH_CLASSES), range(NUM_MARGIN_CLASSES)
    runners_up = [runner_up_class(*one) for one in product(*kinds, range(MOST_RUNNERS_UP), range(4))]
    computed = [computed_class(*place) for place in product(*kinds, range(3), range(4))]
    assert copies == list(range(NUM_COPY_CLASSES))
    assert tables == list(range(NUM_COPY_CLASSES, NUM_LOOK_UP_CLASSES))
    assert computed == list(range(NUM_LOOK_UP_CLASSES, FIRST_RUNNER_UP))
    assert runners_up == list(range(FIRST_RUNNER_UP, NUM_CLASSES))


def test_deep_tokens_share_their_classes():
    assert computed_class(NUM_DEPTH_CLASSES, 4, 1, 2) == computed_class(NUM_DEPTH_CLASSES - 1, 4, 1, 2)
    assert computed_class(NUM_DEPTH_CLASSES - 1, 4, 1, 2) != computed_class(NUM_DEPTH_CLASSES - 2, 4, 1, 2)


def test_larger_margins_start_with_higher_rates():
    rates = HitRates()
    of_margins = [rates.rate(computed_class(1, margin_class(margin), 2, 3)) for margin in (0.1, 0.7, 1.7, 2.5, 9.0)]
    assert of_margins == sorted(of_margins)
    assert of_margins[0] < rates.rate(computed_class(1, margin_class(float("nan")), 2, 3)) < of_margins[-1]


def test_longer_matches_start_with_higher_rates():
    rates = HitRates()
    by_length = [rates.rate(copy_class(0, length, 3, after_computed=False)) for length in LENGTHS]
    assert by_length == sorted(by_length)
    assert 0 < by_length[0] < by_length[-1] < 1


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_rate_comes_to_the_share_of_hits(chance):
    rates, source = HitRates(), random.Random(0)
    for _ in range(5000):
        rates.count(7, is_hit=source.random() < chance)
    assert rates.rate(7) == pytest.approx(chance, abs=0.05)
    assert rates.rate(8) == HitRates().rate(8)


def test_what_was_counted_long_ago_is_forgotten():
    rates = HitRates()
    for is_hit in [True] * 5000 + [False] * 5000:
        rates.count(7, is_hit=is_hit)
    assert rates.rate(7) < 0.01


def test_the_highest_share_belongs_to_the_last_decile():
    assert candidate_class(2, 1.0, after=AFTER_COMPUTED) == NUM_LOOK_UP_CLASSES - 1
