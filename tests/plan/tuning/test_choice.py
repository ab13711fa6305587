"""Choosing: medians less their scatter, ties to the simpler."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.errors import ConfigError
from forerun.plan.tuning.choice import Objective, choose, standings
from tests.plan.tuning.figures import figures


def by_speed(**speeds):
    return {name: [figures(speed) for speed in values] for name, values in speeds.items()}


def pick(rounds, objective=Objective.THROUGHPUT, order=()):
    return choose(rounds, objective, lambda name: (order.index(name),) if name in order else (0,))


def test_the_fastest_wins():
    assert pick(by_speed(a=[100, 101, 99], b=[120, 121, 119])).name == "b"


def test_a_drift_that_all_share_decides_nothing():
    found = pick(by_speed(a=[100, 50, 200], b=[110, 55, 220]))
    assert found.name == "b"
    assert standings(by_speed(a=[100, 50, 200], b=[110, 55, 220]), Objective.THROUGHPUT.criteria[0])[0].mad == 0


def test_within_a_hundredth_the_simpler_one_wins():
    rounds = by_speed(simple=[100, 100], best=[100.9, 100.9])
    assert pick(rounds, order=("simple", "best")) == pick(rounds, order=("simple", "best"))
    assert pick(rounds, order=("simple", "best")).name == "simple"
    assert set(pick(rounds, order=("simple", "best")).tied) == {"simple", "best"}


def test_beyond_a_hundredth_it_does_not():
    assert pick(by_speed(simple=[100, 100], best=[102, 102]), order=("simple", "best")).name == "best"


def test_of_equal_medians_the_steadier_one_wins():
    assert pick(by_speed(steady=[100, 100, 100], wild=[100, 60, 140])).name == "steady"


def test_where_all_keep_the_goals_latency_decides():
    rounds = {
        "slow": [figures(100, latency=2.0, attainment=1.0)] * 2,
        "fast": [figures(100, latency=1.0, attainment=1.0)] * 2,
    }
    assert pick(rounds, Objective.GOODPUT).name == "fast"


def test_goodput_comes_before_latency():
    rounds = {
        "good": [figures(100, latency=2.0, attainment=1.0)] * 2,
        "fast": [figures(100, latency=1.0, attainment=0.5)] * 2,
    }
    assert pick(rounds, Objective.GOODPUT).name == "good"


def test_where_nothing_keeps_any_goal_latency_decides():
    rounds = {"slow": [figures(100, latency=2.0, attainment=0.0)], "fast": [figures(100, attainment=0.0)]}
    assert pick(rounds, Objective.GOODPUT).name == "fast"


def test_one_that_was_dropped_is_compared_by_the_rounds_it_took_part_in():
    assert pick(by_speed(a=[100, 50, 100], b=[150, 75, 150], dropped=[90, 45])).name == "b"


def test_one_that_was_dropped_is_not_chosen_as_its_one_run_scatters_by_nothing():
    rounds = by_speed(a=[100, 88, 112], b=[100, 112, 88], dropped=[89])
    assert standings(rounds, Objective.THROUGHPUT.criteria[0])[0].name == "dropped"
    assert pick(rounds).tied == ("a", "b")


@pytest.mark.parametrize(
    ("objective", "message"), [(Objective.GOODPUT, "without goals"), (Objective.ENERGY, "nothing counts")]
)
def test_a_figure_that_is_missing_is_an_error(objective, message):
    with pytest.raises(ConfigError, match=message):
        pick(by_speed(a=[100]), objective)


@given(speeds=st.lists(st.lists(st.floats(1, 1e4), min_size=3, max_size=3), min_size=1, max_size=5))
def test_the_chosen_one_is_never_more_than_a_hundredth_behind_the_best_score(speeds):
    rounds = {str(number): [figures(speed) for speed in values] for number, values in enumerate(speeds)}
    found = standings(rounds, Objective.THROUGHPUT.criteria[0])
    best, scores = found[0].score, {one.name: one.score for one in found}
    assert scores[pick(rounds).name] >= best - 0.01 * abs(best)
