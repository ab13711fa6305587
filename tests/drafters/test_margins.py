"""Classes of margins, and what they say."""

from __future__ import annotations

import math

import pytest

from forerun.drafters.margins import CHANCES, MARGIN_LIMITS, NUM_MARGIN_CLASSES, UNKNOWN, chance_of_margin, margin_class


def test_each_class_of_margins_has_a_chance_that_rises_with_them():
    assert len(CHANCES) == NUM_MARGIN_CLASSES == len(MARGIN_LIMITS) + 2
    of_known = CHANCES[:UNKNOWN]
    assert list(of_known) == sorted(of_known)
    assert all(0.0 < chance < 1.0 for chance in CHANCES)


@pytest.mark.parametrize(
    ("margin", "found"), [(0.0, 0), (0.25, 1), (0.4, 1), (4.49, 6), (4.5, 7), (math.inf, 7), (math.nan, UNKNOWN)]
)
def test_a_limit_belongs_to_the_class_above_it(margin, found):
    assert margin_class(margin) == found
    assert chance_of_margin(margin) == CHANCES[found]
