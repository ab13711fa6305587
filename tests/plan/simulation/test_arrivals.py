"""Requests come at the rates that a pattern says, as unevenly as it says, and the same ones each time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.errors import ConfigError
from forerun.plan.load import Load
from forerun.plan.simulation.arrivals import SECONDS_OF_DAY, ArrivalPattern
from forerun.plan.simulation.requests import synthetic_requests


def draw(pattern, count, seed=0):
    return pattern.times(count, np.random.default_rng(seed))


@given(st.floats(0.1, 1000), st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.integers(0, 99))
def test_times_rise_and_the_same_seed_gives_the_same_and_a_longer_run_more_of_them(rate, cv, seed):
    pattern = ArrivalPattern.steady(rate, cv=cv)
    times = draw(pattern, 50, seed)
    assert (np.diff(times) >= 0).all()
    assert times[0] >= 0
    assert draw(pattern, 80, seed)[:50].tolist() == times.tolist()


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 2.0])
def test_a_steady_rate_has_its_mean_and_its_coefficient_of_variation(cv):
    gaps = np.diff(draw(ArrivalPattern.steady(20, cv=cv), 40_000))
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, abs=0.05)


def test_next_to_no_variation_is_none():
    """Of which no distribution has a shape that is a number."""
    assert ArrivalPattern.steady(2, cv=1e-200).times(3, np.random.default_rng(0)).tolist() == [0.5, 1.0, 1.5]
    load = Load(rate=2, isl=30, osl=7, isl_cv=1e-200, osl_cv=1e-300)
    assert {(one.num_prompt_tokens, one.num_output_tokens) for one in synthetic_requests(load, 5)} == {(30, 7)}


def test_bursts_have_the_mean_rate_and_the_factor():
    pattern = ArrivalPattern.bursts(10, factor=5, every=20, length=4)
    times = draw(pattern, 50_000)
    is_burst = times % 20 >= 16
    assert len(times) / times[-1] == pytest.approx(10, rel=0.03)
    assert (is_burst.sum() / 4) / ((~is_burst).sum() / 16) == pytest.approx(5, rel=0.05)


def test_a_day_is_lowest_at_midnight_and_highest_at_noon():
    times = draw(ArrivalPattern.day(1.0, peak=1.8), 5 * int(SECONDS_OF_DAY)) % SECONDS_OF_DAY
    hours, _ = np.histogram(times, bins=24, range=(0, SECONDS_OF_DAY))
    rates = hours / 5 / 3600
    assert rates[[0, 23]].mean() == pytest.approx(0.2, abs=0.05)
    assert rates[[11, 12]].mean() == pytest.approx(1.8, abs=0.05)
    assert rates.mean() == pytest.approx(1.0, rel=0.02)


def test_a_round_has_the_requests_of_its_mean_rate():
    assert ArrivalPattern.day(2.0, peak=1.5, period=100.0).requests_per_round == pytest.approx(200.0)
    assert ArrivalPattern.bursts(10, factor=5, every=20, length=4).requests_per_round == pytest.approx(200.0)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: ArrivalPattern.steady(0), "all rates are 0"),
        (lambda: ArrivalPattern.steady(-1), "a rate of -1"),
        (lambda: ArrivalPattern.steady(1, cv=-0.1), "cv=-0.1"),
        (lambda: ArrivalPattern.steady(1, cv=1e200), r"cv=1e\+200; must be a number from 0"),
        (lambda: ArrivalPattern(durations=(1.0,), rates=()), "1 durations for 0 rates"),
        (lambda: ArrivalPattern(durations=(0.0,), rates=(1.0,)), "a duration of 0"),
        (lambda: ArrivalPattern.bursts(1, factor=2, every=5, length=5), "bursts of 5 s every 5 s"),
        (lambda: ArrivalPattern.day(1, peak=2.5), "a peak of 2.5"),
    ],
)
def test_impossible_patterns_are_refused(make, problem):
    with pytest.raises(ConfigError, match=problem):
        make()
