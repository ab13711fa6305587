"""Engines behind a router that balances, against a simulation of such a router."""

import heapq
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.plan.balanced import balance, pooled_wait
from forerun.plan.capacity import Routing, predict
from forerun.plan.draft_lengths import step_table
from forerun.plan.load import Load
from forerun.plan.queueing import erlang_c
from forerun.plan.serving_policies import ServingPolicy
from tests.plan.worlds import engine_model


@given(st.lists(st.floats(0.01, 15.0), min_size=1, max_size=4), st.integers(2, 100), st.floats(0.5, 3.0))
def test_shares_are_shares_and_keep_the_mean(means: list[float], num_engines: int, peakedness: float) -> None:
    served = np.array(means)
    found = balance(served, np.full(len(means), float(num_engines)), np.full(len(means), peakedness), 16)
    for shares in (found.share, found.met_share, found.seen_share):
        assert np.all(shares >= 0.0)
        assert shares.sum(axis=1) == pytest.approx(np.ones(len(means)))
    assert np.all((found.company >= 0.0) & (found.company <= 1.0))


def test_with_many_engines_all_have_almost_the_same() -> None:
    found = balance(np.array([2.25]), np.array([1e6]), np.ones(1), 8)
    assert found.share[0, 2:4] == pytest.approx([0.75, 0.25], abs=0.01)
    assert found.seen_share[0, 1:3] == pytest.approx([1.5 / 2.25, 0.75 / 2.25], abs=0.01)
    assert found.met_share[0, 1:3] == pytest.approx([1.5 / 2.25, 0.75 / 2.25], abs=0.01)
    assert found.company[0] == pytest.approx((1 * 1.5 + 2 * 0.75) / 2.25**2, rel=0.01)


def test_while_an_engine_is_idle_requests_are_alone() -> None:
    found = balance(np.array([0.4]), np.array([1e6]), np.ones(1), 8)
    assert found.met_share[0, 0] == pytest.approx(1.0)
    assert found.seen_share[0, 0] == pytest.approx(1.0)
    assert found.company[0] == pytest.approx(0.0, abs=1e-5)


def test_arrivals_meet_what_a_simulated_router_lets_them_meet() -> None:
    num_engines, mean, source = 30, 1.4, random.Random(2)
    engines, ends, now = [0] * num_engines, [], 0.0
    met: list[int] = []
    for _ in range(40_000):
        now += source.expovariate(num_engines * mean)
        while ends and ends[0][0] <= now:
            engines[heapq.heappop(ends)[1]] -= 1
        number = min(range(num_engines), key=lambda one: engines[one])
        met.append(engines[number])
        engines[number] += 1
        heapq.heappush(ends, (now + source.expovariate(1.0), number))
    found = balance(np.array([mean]), np.array([float(num_engines)]), np.ones(1), 8)
    for count in range(3):
        assert found.met_share[0, count] == pytest.approx(met.count(count) / len(met), abs=0.05)
    expected = found.met_share[0] @ np.arange(9)
    assert expected == pytest.approx(np.mean(met), abs=0.05)


@pytest.mark.parametrize("num_servers", [50, 200, 1000])
@pytest.mark.parametrize("utilization", [0.7, 0.9, 0.98])
def test_the_pooled_wait_is_near_erlangs(num_servers: int, utilization: float) -> None:
    chance, wait = pooled_wait(
        np.array([float(num_servers)]), np.array([utilization]), np.array([num_servers * (1.0 - utilization)])
    )
    exact = erlang_c(num_servers, num_servers * utilization)
    assert chance[0] == pytest.approx(exact, rel=0.1, abs=0.02)
    assert wait[0] == pytest.approx(chance[0] / (num_servers * (1.0 - utilization)))


def test_balancing_is_never_worse_than_chance_and_one_engine_has_nothing_to_balance() -> None:
    engine, load = engine_model(max_num_seqs=16), Load(rate=40, isl=100, osl=50)
    table = step_table(engine.step_times, None, max_batch_size=16, context=125)
    policy = ServingPolicy(speculation=None, lengths=np.zeros(16, dtype=np.int64), max_num_seqs=16, table=table)
    counts = np.array([1, 2, 4, 16])
    by_routing = [
        predict(engine, policy, load, load.rate / counts, num_engines=counts, routing=routing) for routing in Routing
    ]
    balanced, at_random = by_routing
    assert balanced.e2el.mean[0] == at_random.e2el.mean[0]
    assert np.all(balanced.e2el.mean[1:] < at_random.e2el.mean[1:])
    assert np.all(balanced.ttft.quantile(0.95)[1:] <= at_random.ttft.quantile(0.95)[1:])
