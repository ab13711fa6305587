"""A served run that the simulator itself has written is simulated without an error, and its server's costs are found."""

from __future__ import annotations

import pytest

from benchmarks.simulation_accuracy.comparison import compare, fit_serving, summary
from benchmarks.simulation_accuracy.prompts import KINDS, mixed_prompts, prompts_by_kind
from forerun.plan.load import Load
from forerun.plan.simulation.profiled import ServingCost, profiled_engine
from forerun.plan.simulation.requests import SimulatedRequest, synthetic_requests
from tests.plan.simulation.profiles import a_profile

SERVING = ServingCost(seconds_per_request=0.004, seconds_per_chunk=0.0003)
PROMPTS = [[number % 97] * (20 + number % 7) for number in range(30)]


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    return a_profile(tmp_path_factory.mktemp("profile"))


def served(profile, config="plain"):
    """What `forerun bench serve` would say of a server that is just as simulated."""
    arrivals = [one.arrival for one in synthetic_requests(Load(rate=15, isl=20, osl=30), len(PROMPTS))]
    requests = [
        SimulatedRequest(arrival=arrival, num_prompt_tokens=len(ids), num_output_tokens=30, prompt_ids=ids)
        for arrival, ids in zip(arrivals, PROMPTS, strict=True)
    ]
    records = profiled_engine(profile, config, gigabytes_per_second=50.0, serving=SERVING).simulate(requests).requests
    first = records[0].arrival
    return {
        "config": config,
        "load": "a load",
        "share": 0.5,
        "gigabytes_per_second": 50.0,
        "input_lens": [len(ids) for ids in PROMPTS],
        "output_lens": [one.num_output_tokens for one in records],
        "start_times": [100 + one.arrival - first for one in records],
        "ttfts": [one.ttft for one in records],
        "latencies": [one.e2el for one in records],
    }


@pytest.mark.parametrize("config", ["plain", "suffix", "auto"])
def test_what_is_simulated_right_has_no_error(profile, config):
    found = compare(served(profile, config), profile, SERVING, PROMPTS, seed=0)
    assert all(error == pytest.approx(0, abs=1e-6) for error in found.errors.values())
    assert all(one["within_goal"] == 1 for one in summary([found]).values())


def test_the_servers_costs_are_found(profile):
    found = fit_serving(served(profile), profile, PROMPTS)
    assert found.seconds_per_chunk == pytest.approx(SERVING.seconds_per_chunk, rel=0.05)
    assert found.seconds_per_request == pytest.approx(SERVING.seconds_per_request, rel=0.1)


def test_prompts_of_the_test_are_none_of_the_profiles():
    test, profiled = (prompts_by_kind(100, is_test=is_test) for is_test in (True, False))
    assert all(len(test[kind]) == 100 for kind in KINDS)
    assert not {one for some in test.values() for one in some} & {one for some in profiled.values() for one in some}
    assert len(set(mixed_prompts(300, is_test=True))) == 300
