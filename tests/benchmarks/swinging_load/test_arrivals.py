"""Arrivals of quiet phases and bursts."""

from __future__ import annotations

import pytest

from benchmarks.swinging_load.arrivals import Swing, draw_arrivals

SWING = Swing(quiet_rate=0.5, quiet_seconds=10.0, burst_rate=8.0, burst_seconds=5.0)


@pytest.mark.parametrize("seed", range(3))
def test_each_phase_has_the_requests_of_its_rate(seed):
    times = draw_arrivals(SWING, num_swings=2, seed=seed)
    phases = [(0, 10), (10, 15), (15, 25), (25, 30)]
    assert [sum(start <= at < end for at in times) for start, end in phases] == [5, 40, 5, 40]


def test_arrivals_come_in_order_and_the_same_for_the_same_seed():
    times = draw_arrivals(SWING, num_swings=2, seed=1)
    assert times == sorted(times) == draw_arrivals(SWING, num_swings=2, seed=1)
    assert times != draw_arrivals(SWING, num_swings=2, seed=2)
