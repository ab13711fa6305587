"""Distributions of latencies: a quantile is the least latency that enough requests keep."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.plan.latencies import WaitThenServed

seconds = st.lists(st.floats(1e-4, 10.0), min_size=1, max_size=5)


@given(seconds, st.floats(0.0, 1.0), st.floats(1e-6, 100.0), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_a_quantile_is_the_least_latency_that_enough_requests_keep(
    service: list[float], wait_chance: float, mean_wait: float, share: float
) -> None:
    found = WaitThenServed(np.array([service, service]), np.full(2, wait_chance), np.array([mean_wait, np.inf]))
    quantile, endless = found.quantile(share)
    assert endless == np.inf
    assert found.share_within(quantile * (1.0 + 1e-12))[0] >= share * (1.0 - 1e-12)
    assert found.share_within(quantile * (1.0 - 1e-8))[0] <= share


def test_quantiles_of_an_exponential_wait_are_known() -> None:
    found = WaitThenServed(np.zeros((1, 1)), np.ones(1), np.full(1, 2.0))
    assert found.quantile(0.95)[0] == pytest.approx(-2.0 * np.log(0.05))
