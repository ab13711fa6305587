"""Arrival times: rates, seeds, bursts, ramps."""

from __future__ import annotations

import math

import numpy as np
import pytest

from forerun.bench.load.arrivals import draw_arrivals, draw_arrivals_within, rates
from forerun.bench.load.workload import Traffic
from forerun.errors import ConfigError


def draw(count=1000, seed=0, **settings):
    return draw_arrivals(Traffic(**settings), count, np.random.default_rng(seed))


def test_without_a_rate_all_come_at_once():
    assert draw(3).tolist() == [0, 0, 0]


def test_at_a_rate_the_last_comes_at_count_by_rate_whatever_the_seed():
    assert [draw(100, seed, request_rate=8)[-1] for seed in range(3)] == pytest.approx([12.5] * 3)


def test_a_seed_gives_the_same_arrivals_and_another_seed_others():
    assert draw(seed=1, request_rate=2).tolist() == draw(seed=1, request_rate=2).tolist()
    assert draw(seed=1, request_rate=2).tolist() != draw(seed=2, request_rate=2).tolist()


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_vary_as_a_gamma_distribution_of_that_shape(burstiness):
    gaps = np.diff(draw(20000, request_rate=5, burstiness=burstiness))
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_infinite_burstiness_is_a_fixed_beat():
    assert draw(4, request_rate=2, burstiness=math.inf).tolist() == [0.5, 1, 1.5, 2]


@pytest.mark.parametrize(("strategy", "middle"), [("linear", 5.0), ("exponential", 3.0)], ids=["linear", "exponential"])
def test_a_ramp_goes_from_start_to_end(strategy, middle):
    traffic = Traffic(ramp_up_strategy=strategy, ramp_up_start_rps=1, ramp_up_end_rps=9)
    assert rates(traffic, 3).tolist() == pytest.approx([1, middle, 9])


def test_a_ramp_has_as_many_gaps_of_each_length_as_its_rates_say():
    ramp = {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1, "ramp_up_end_rps": 4, "burstiness": math.inf}
    assert draw(4, **ramp).tolist() == pytest.approx(np.cumsum([1, 1 / 2, 1 / 3, 1 / 4]).tolist())


def test_a_duration_is_filled_at_the_rate_and_not_passed():
    times = draw_arrivals_within(Traffic(request_rate=7, duration=10), 10, np.random.default_rng(0))
    assert (len(times), times[-1]) == (70, pytest.approx(10))


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_a_ramp_over_a_duration_ends_with_it(strategy):
    traffic = Traffic(
        ramp_up_strategy=strategy, ramp_up_start_rps=1, ramp_up_end_rps=9, burstiness=math.inf, duration=20
    )
    times = draw_arrivals_within(traffic, 20, np.random.default_rng(0))
    assert 19 < times[-1] <= 20
    assert 1 / (times[-1] - times[-2]) == pytest.approx(9, rel=0.05)


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"request_rate": 0}, "request_rate: got 0; must be more than 0"),
        ({"burstiness": -1}, "burstiness: got -1; must be more than 0"),
        ({"max_concurrency": 0}, "max_concurrency: got 0; must be 1 or more"),
        ({"num_warmups": -1}, "num_warmups: got -1; must be 0 or more"),
        ({"duration": 5}, "duration: got no limit"),
        ({"duration": math.inf, "max_concurrency": 1}, "duration: got inf"),
        ({"ramp_up_start_rps": 1}, "given without ramp_up_strategy"),
        ({"ramp_up_strategy": "linear"}, "give its start and end rps too"),
        ({"ramp_up_strategy": "linear", "ramp_up_start_rps": 5, "ramp_up_end_rps": 1}, "must be at most"),
        (
            {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1, "ramp_up_end_rps": 5, "request_rate": 3},
            "request_rate: got 3 with a ramp-up",
        ),
    ],
)
def test_traffic_that_cannot_be_is_refused(settings, hint):
    with pytest.raises(ConfigError, match=hint):
        Traffic(**settings)
