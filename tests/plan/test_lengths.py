"""Lengths of a load, held against those that the simulator draws."""

import numpy as np
import pytest

from forerun.plan.lengths import prompt_lengths, tokens_after_first
from forerun.plan.load import Load
from forerun.plan.simulation.requests import synthetic_requests

LOAD = Load(rate=1, isl=400, osl=100)
SHARES = [0.1, 0.5, 0.9, 0.95]


@pytest.mark.parametrize("cv", [0.2, 0.5, 1.0, 2.0])
def test_lengths_are_distributed_as_the_simulator_draws_them(cv: float) -> None:
    load = Load(rate=1, isl=400, osl=100, isl_cv=cv, osl_cv=cv)
    drawn = synthetic_requests(load, 20_000, seed=5)
    prompts = np.array([one.num_prompt_tokens for one in drawn])
    after = np.array([one.num_output_tokens - 1 for one in drawn if one.num_output_tokens > 1])
    for found, real in ((prompt_lengths(load), prompts), (tokens_after_first(load), after)):
        assert found.mean() == pytest.approx(real.mean(), rel=0.05)
        assert found.std() == pytest.approx(real.std(), rel=0.1)
        assert np.quantile(found, SHARES) == pytest.approx(np.quantile(real, SHARES), rel=0.15, abs=3.0)
    assert (1 / tokens_after_first(load)).mean() == pytest.approx((1 / after).mean(), rel=0.2)


def test_lengths_without_spread_are_all_the_mean() -> None:
    assert set(prompt_lengths(LOAD)) == {400.0}
    assert set(tokens_after_first(LOAD)) == {99.0}


def test_of_a_prompt_all_but_the_shared_beginning_is_computed() -> None:
    load = Load(rate=1, isl=400, osl=100, isl_cv=1.0, prefix_hit_rate=0.5)
    whole = prompt_lengths(Load(rate=1, isl=400, osl=100, isl_cv=1.0))
    assert prompt_lengths(load) == pytest.approx(np.maximum(1.0, whole - 200.0))


@pytest.mark.parametrize("cv", [1e-9, 0.01, 30.0, 1e4])
def test_lengths_of_any_spread_are_numbers_of_tokens(cv: float) -> None:
    load = Load(rate=1, isl=400, osl=1.2, isl_cv=cv, osl_cv=cv)
    for found in (prompt_lengths(load), tokens_after_first(load)):
        assert len(found)
        assert np.isfinite(found).all()
        assert found.min() >= 1.0
