"""Acceptance: the formulas agree with enumeration and with counting, and a profile comes back from ModelOpt's keys."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.errors import ConfigError
from forerun.plan.acceptance import AcceptanceProfile

RATES = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6).map(tuple)


def _enumerated(rates: tuple[float, ...]) -> dict[int, float]:
    """The chance of each number of accepted tokens, over all outcomes of all places."""
    chances: dict[int, float] = {}
    for stood in itertools.product((True, False), repeat=len(rates)):
        chance = 1.0
        for rate, one in zip(rates, stood, strict=True):
            chance *= rate if one else 1.0 - rate
        count = len(list(itertools.takewhile(bool, stood)))
        chances[count] = chances.get(count, 0.0) + chance
    return chances


@given(RATES)
def test_chances_mean_and_variance_are_those_of_all_outcomes(rates: tuple[float, ...]) -> None:
    profile = AcceptanceProfile(method="any", conditional=rates)
    k, chances = len(rates), _enumerated(rates)
    assert profile.pmf(k).tolist() == pytest.approx([chances.get(count, 0.0) for count in range(k + 1)])
    mean = sum((count + 1) * chance for count, chance in chances.items())
    assert profile.expected(k) == pytest.approx(mean)
    variance = sum((count + 1 - mean) ** 2 * chance for count, chance in chances.items())
    assert profile.variance(k) == pytest.approx(variance, abs=1e-9)


@given(RATES)
def test_a_longer_draft_never_yields_less_and_none_yields_one_token(rates: tuple[float, ...]) -> None:
    profile = AcceptanceProfile(method="any", conditional=rates)
    means = [profile.expected(k) for k in range(len(rates) + 1)]
    assert means[0] == 1.0
    assert means == sorted(means)
    assert profile.variance(0) == 0.0


def test_rates_come_from_counts_and_places_that_nobody_reached_are_left_out() -> None:
    profile = AcceptanceProfile.of_counts("suffix", 100, [50, 20, 0, 0], [80, 60, 40, 40])
    assert profile.conditional == (0.5, 0.4, 0.0)
    assert profile.num_reached == (100, 50, 20)
    assert profile.mean_draft_tokens(2) == pytest.approx(1.4)
    assert profile.to_json()["acceptance_length_histogram"] == {"1": 50, "2": 30, "3": 20, "4": 0}


@given(st.lists(st.integers(0, 200), min_size=1, max_size=5), st.floats(0.5, 0.99))
def test_the_lower_end_is_below_the_rates_and_closer_with_more_counts(drawn: list[int], confidence: float) -> None:
    stood = sorted(drawn, reverse=True)
    few = AcceptanceProfile.of_counts("any", 200, stood)
    many = AcceptanceProfile.of_counts("any", 20_000, [100 * count for count in stood])
    for rate, low, close in zip(
        few.conditional, few.lower(confidence).conditional, many.lower(confidence).conditional, strict=True
    ):
        assert 0.0 <= low <= rate + 1e-12
        assert close >= low - 1e-12


def test_a_profile_comes_back_from_json_and_from_modelopts_keys_alone() -> None:
    profile = AcceptanceProfile.of_counts("eagle3", 1000, [800, 600, 400], [1000, 1000, 1000])
    record = json.loads(json.dumps(profile.to_json(model="m")))
    assert AcceptanceProfile.from_json(record) == profile
    assert record["mean_accept_length"] == pytest.approx(1 + sum(record["marginal_accept_rates"]))
    assert record["measurement_conditions"] == {"model": "m"}
    del record["num_reached"], record["proposed_rates"]
    assert AcceptanceProfile.from_json(record).conditional == profile.conditional


def test_what_is_no_rate_or_not_known_is_refused() -> None:
    for rates in ((), (1.5,), (float("nan"),), (-0.1,)):
        with pytest.raises(ConfigError, match="acceptance of any"):
            AcceptanceProfile(method="any", conditional=rates)
    profile = AcceptanceProfile(method="any", conditional=(0.5, 0.5))
    with pytest.raises(ConfigError, match="from 0 to 2"):
        profile.expected(3)
    with pytest.raises(ConfigError, match="has no counts"):
        profile.lower(0.9)
    with pytest.raises(ConfigError, match="no draft was judged"):
        AcceptanceProfile.of_counts("any", 0, [])
    with pytest.raises(ConfigError, match="lacks 'conditional_accept_rates'"):
        AcceptanceProfile.from_json({"method": "any"})
