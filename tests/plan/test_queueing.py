"""Waiting lines against closed forms and a simulation."""

import heapq
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.plan.queueing import erlang_c, load_dependent, mean_wait


def erlang_c_by_its_sum(num_servers: int, offered: float) -> float:
    waiting = offered**num_servers / math.factorial(num_servers) * num_servers / (num_servers - offered)
    return waiting / (sum(offered**n / math.factorial(n) for n in range(num_servers)) + waiting)


@given(st.integers(1, 40), st.floats(0.01, 0.99))
def test_erlang_c_is_its_sum(num_servers: int, utilization: float) -> None:
    offered = num_servers * utilization
    assert erlang_c(num_servers, offered) == pytest.approx(erlang_c_by_its_sum(num_servers, offered))


def test_a_server_that_cannot_keep_up_makes_all_wait_forever() -> None:
    assert erlang_c(2, 2.0) == 1.0
    assert mean_wait(2.0, 1.0, 2) == math.inf


@given(st.integers(1, 30), st.floats(0.05, 0.98), st.floats(0.01, 10.0))
def test_places_of_equal_speed_are_erlangs_servers(num_places: int, utilization: float, seconds: float) -> None:
    rate = num_places * utilization / seconds
    found = load_dependent(np.array([rate]), np.arange(1, num_places + 1)[None] / seconds)
    assert found.wait_chance[0] == pytest.approx(erlang_c(num_places, rate * seconds))
    assert found.mean_wait[0] == pytest.approx(mean_wait(rate, seconds, num_places))
    assert found.mean_served[0] == pytest.approx(rate * seconds)  # Little's law


def test_one_speed_for_all_is_processor_sharing() -> None:
    found = load_dependent(np.array([0.6]), np.ones((1, 400)))
    assert found.mean_served[0] == pytest.approx(0.6 / 0.4)
    assert found.wait_chance[0] < 1e-9


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=20), st.floats(0.01, 5.0))
def test_shares_are_shares_and_more_arrivals_mean_more_served(speeds: list[float], rate: float) -> None:
    departures = np.cumsum(speeds)[None].repeat(2, axis=0)
    found = load_dependent(np.array([rate, rate * 1.1]), departures)
    assert np.all(found.share >= 0.0)
    assert found.share.sum(axis=1) == pytest.approx([1.0, 1.0])
    assert found.seen_share.sum(axis=1) == pytest.approx([1.0, 1.0])
    assert found.mean_served[0] <= found.mean_served[1] + 1e-9
    assert found.mean_wait[0] <= found.mean_wait[1]


def test_an_unstable_server_is_full_and_says_so() -> None:
    found = load_dependent(np.array([3.0]), np.array([[1.0, 2.0]]))
    assert not found.is_stable[0]
    assert found.mean_wait[0] == math.inf
    assert found.mean_served[0] == 2.0


def test_the_chain_is_a_simulation_of_jobs_that_share_a_server() -> None:
    speeds = [0.0, 1.0, 1.6, 2.0]  # in all, for so many at once; a fourth waits
    rate, randomness = 1.5, random.Random(1)
    queue: list[float] = [randomness.expovariate(rate)]
    now, in_system, area, waited, num_arrivals = 0.0, 0, 0.0, 0, 0
    for _ in range(60_000):
        total = speeds[min(in_system, 3)]
        leaves = now + randomness.expovariate(total) if total else math.inf  # exponential: memory starts afresh
        arrives = queue[0]
        until = min(leaves, arrives)
        area += min(in_system, 3) * (until - now)
        now = until
        if arrives <= leaves:
            heapq.heapreplace(queue, now + randomness.expovariate(rate))
            num_arrivals += 1
            waited += in_system >= 3
            in_system += 1
        else:
            in_system -= 1
    found = load_dependent(np.array([rate]), np.array([speeds[1:]]))
    assert found.mean_served[0] == pytest.approx(area / now, rel=0.03)
    assert found.wait_chance[0] == pytest.approx(waited / num_arrivals, rel=0.05)
