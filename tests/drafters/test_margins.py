"""Classes of margins, and what they say."""

from __future__ import annotations

import math
from array import array

import pytest

from forerun.drafters.margins import (
    MARGIN_LIMITS,
    NUM_MARGIN_CLASSES,
    PRIOR_CHANCES,
    UNKNOWN,
    ChancesOfMargins,
    EarlyStop,
    margin_class,
)


def test_each_class_of_margins_begins_with_a_chance_that_rises_with_them():
    assert len(PRIOR_CHANCES) == NUM_MARGIN_CLASSES == len(MARGIN_LIMITS) + 2
    of_known = PRIOR_CHANCES[:UNKNOWN]
    assert list(of_known) == sorted(of_known)
    assert all(0.0 < chance < 1.0 for chance in PRIOR_CHANCES)


@pytest.mark.parametrize(
    ("margin", "found"), [(0.0, 0), (0.25, 1), (0.4, 1), (4.49, 6), (4.5, 7), (math.inf, 7), (math.nan, UNKNOWN)]
)
def test_a_limit_belongs_to_the_class_above_it(margin, found):
    assert margin_class(margin) == found


def test_chances_come_to_what_is_counted_each_class_apart():
    chances = ChancesOfMargins()
    for i in range(600):
        chances.observe(0.1, stood=i % 4 != 0)
        chances.observe(9.0, stood=False)
    assert chances.chances[0] == pytest.approx(0.75, abs=0.05)
    assert chances.chances[7] < 0.05
    assert list(chances.chances[1:7]) == list(PRIOR_CHANCES[1:7])


def test_the_mean_is_over_all_tokens_those_without_a_known_margin_too():
    chances = ChancesOfMargins()
    for _ in range(2000):
        chances.observe(math.nan, stood=True)
    assert chances.mean > 0.8
    assert len(chances.chances) == UNKNOWN


def test_a_token_without_a_known_margin_ends_no_chain():
    stop = EarlyStop(0.5, array("d", PRIOR_CHANCES[:UNKNOWN]))
    assert stop.chance_of(math.nan) == 1.0
    assert stop.chance_of(0.3) == PRIOR_CHANCES[1]
