"""How often drafts stand, by depth."""

from __future__ import annotations

import pytest

from forerun.core.depth_rates import PRIOR_RATE, DepthRates
from forerun.core.draft import Draft


def test_rates_follow_what_stood():
    rates = DepthRates()
    for i in range(1000):
        rates.observe("model", depth=3, num_stood=2 if i % 2 else 0)
    assert rates.survival(Draft((1, 2, 3), source="model")) == pytest.approx((0.5, 0.5, 0.0), abs=0.02)
    assert rates.survival(Draft((1,), source="another")) == (PRIOR_RATE,)


def test_what_lies_behind_a_miss_tells_nothing():
    rates = DepthRates()
    before = rates.chances("model", 3)
    for _ in range(50):
        rates.observe("model", depth=3, num_stood=0)
    after = rates.chances("model", 3)
    assert after[1] < 0.1
    assert after[2] / after[1] == pytest.approx(before[2] / before[1])


def test_siblings_share_the_chance_that_one_of_them_stands():
    rates = DepthRates()
    for _ in range(1000):
        rates.observe("model", depth=2, num_stood=1)
    of_chain = rates.survival(Draft((1, 2), source="model"))
    of_tree = rates.survival(Draft((1, 2, 3, 4), (-1, -1, -1, 0), source="model"))
    assert of_tree[:3] == pytest.approx([of_chain[0] / 3] * 3)
    assert sum(of_tree[:3]) <= 1.0
    assert rates.survival(Draft((1, 2), (-1, 0), source="model")) == of_chain


def test_a_trees_chances_fall_in_the_order_of_its_nodes():
    found = DepthRates().survival(Draft((1, 2, 3, 4), (-1, 0, -1, 2)))
    assert list(found) == sorted(found, reverse=True)
