"""What a running service teaches."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.errors import ConfigError
from forerun.plan.acceptance import AcceptanceProfile
from forerun.plan.corrections import FEWEST_STEPS, CorrectionFactor, Corrections, with_drafted, with_length


def test_a_factor_goes_to_the_ratio_that_is_observed() -> None:
    factor = CorrectionFactor("step time")
    assert factor.checked() == 1.0
    factor.observe(observed=1.2, predicted=1.0, num_steps=100)
    assert factor.value == pytest.approx(1.2)
    factor.observe(observed=0.9, predicted=1.0, num_steps=100)
    assert factor.value == pytest.approx(1.2 - 0.3 * 0.3)
    for _ in range(40):
        factor.observe(observed=0.9, predicted=1.0, num_steps=100)
    assert factor.checked() == pytest.approx(0.9, rel=1e-4)


def test_an_idle_or_cold_service_teaches_nothing() -> None:
    factor = CorrectionFactor("step time")
    factor.observe(observed=9.0, predicted=1.0, num_steps=FEWEST_STEPS - 1)
    assert (factor.value, factor.num_observations) == (1.0, 0)


@pytest.mark.parametrize("observed", [0.0, -1.0, math.nan, math.inf])
def test_an_observation_that_cannot_be_is_refused(observed: float) -> None:
    with pytest.raises(ConfigError, match="above 0"):
        CorrectionFactor("step time").observe(observed=observed, predicted=1.0, num_steps=100)


def test_an_error_says_that_nothing_may_be_observed_where_it_may() -> None:
    factor = Corrections().acceptance
    with pytest.raises(ConfigError, match=r"got observed -1\.0; must be a finite number at least 0"):
        factor.observe(observed=-1.0, predicted=1.0, num_steps=100)
    with pytest.raises(ConfigError, match=r"got predicted 0\.0; must be a finite number above 0"):
        factor.observe(observed=0.0, predicted=0.0, num_steps=100)


def test_a_profile_of_something_else_is_not_corrected_but_said() -> None:
    factor = CorrectionFactor("step time")
    factor.observe(observed=3.0, predicted=1.0, num_steps=100)
    with pytest.raises(ConfigError, match=r"3\.00 times what the profile says.*profile again"):
        factor.checked()


def test_time_and_acceptance_are_told_apart() -> None:
    both = Corrections()
    both.time.observe(observed=1.1, predicted=1.0, num_steps=100)
    both.acceptance.observe(observed=1.0, predicted=4.0, num_steps=100)
    assert (both.time.checked(), both.acceptance.checked()) == (pytest.approx(1.1), pytest.approx(0.25))
    both.acceptance.observe(observed=0.0, predicted=4.0, num_steps=100)
    assert both.acceptance.checked() == pytest.approx(0.7 * 0.25), "drafts may add nothing"
    both.acceptance.observe(observed=100.0, predicted=4.0, num_steps=100)
    with pytest.raises(ConfigError, match=r"drafted tokens of a step: .* must be from 0 to 5"):
        both.acceptance.checked()


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6), st.floats(0.0, 20.0))
def test_one_factor_fits_configurations_that_add_little_and_much(rates: list[float], factor: float) -> None:
    """What drafts add is scaled, so that no length is below 1, and none is above what its places yield."""
    rates = [0.0 if rate < 1e-3 else rate for rate in rates]
    profile = AcceptanceProfile(method="eagle3", conditional=tuple(rates))
    most = 1.0 + (rates.index(0.0) if 0.0 in rates else len(rates))
    wanted = 1.0 + factor * (profile.mean_accept_length - 1.0)
    assert with_drafted(profile, factor).mean_accept_length == pytest.approx(min(wanted, most), rel=1e-5)


@given(st.lists(st.floats(0.05, 0.95), min_size=1, max_size=6), st.floats(0.0, 1.0))
def test_an_observed_length_is_met(rates: list[float], share: float) -> None:
    profile = AcceptanceProfile(method="eagle3", conditional=tuple(rates))
    length = 1.0 + share * len(rates)
    assert with_length(profile, length).mean_accept_length == pytest.approx(length, rel=1e-6)


def test_a_length_that_no_draft_yields_is_refused() -> None:
    profile = AcceptanceProfile(method="eagle3", conditional=(0.5, 0.0))
    with pytest.raises(ConfigError, match="must be from 1 to 3"):
        with_length(profile, 3.5)
    with pytest.raises(ConfigError, match="some places never stand"):
        with_length(profile, 2.5)
