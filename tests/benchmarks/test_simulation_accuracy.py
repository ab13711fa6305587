"""A served run that the simulator itself has written is simulated without an error, and its server's costs are found."""

from __future__ import annotations

import pytest

from benchmarks.simulation_accuracy.comparison import ServedRun, compare, fit_serving, summary
from benchmarks.simulation_accuracy.prompts import KINDS, mixed_prompts, prompts_by_kind
from forerun.plan.load import Load
from forerun.plan.simulation.profiled import ServingCost, profiled_engine
from forerun.plan.simulation.requests import SimulatedRequest, synthetic_requests
from tests.plan.simulation.profiles import a_profile

SERVING = ServingCost(seconds_per_request=0.004, seconds_per_step=0.0005, seconds_per_chunk=0.0003)
PROMPTS = [[number % 97] * (20 + number % 7) for number in range(30)]


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    return a_profile(tmp_path_factory.mktemp("profile"))


def served(profile, config="plain", *, rate=15.0, gigabytes_per_second=None):
    """What `forerun bench serve` would say of a server that is just as simulated."""
    arrivals = [one.arrival for one in synthetic_requests(Load(rate=rate, isl=20, osl=30), len(PROMPTS))]
    kinds = [("code", "chat")[number % 2] for number in range(len(PROMPTS))]
    requests = [
        SimulatedRequest(arrival=arrival, num_prompt_tokens=len(ids), num_output_tokens=30, prompt_ids=ids, kind=kind)
        for arrival, ids, kind in zip(arrivals, PROMPTS, kinds, strict=True)
    ]
    engine = profiled_engine(profile, config, gigabytes_per_second=gigabytes_per_second, serving=SERVING)
    records = engine.simulate(requests).requests
    first = records[0].arrival
    return ServedRun(
        config=config,
        load="a load",
        share=0.5,
        gigabytes_per_second=50.0,
        assumed_gigabytes_per_second=gigabytes_per_second,
        prompts=PROMPTS,
        kinds=kinds,
        input_lens=[len(ids) for ids in PROMPTS],
        output_lens=[one.num_output_tokens for one in records],
        start_times=[100 + one.arrival - first for one in records],
        ttfts=[one.ttft for one in records],
        latencies=[one.e2el for one in records],
    )


@pytest.mark.parametrize("config", ["plain", "suffix", "auto"])
@pytest.mark.parametrize("gigabytes_per_second", [None, 50.0])
def test_what_is_simulated_right_has_no_error(profile, config, gigabytes_per_second):
    run = served(profile, config, gigabytes_per_second=gigabytes_per_second)
    found = compare([run, run], profile, SERVING, seed=0)
    assert all(error == pytest.approx(0, abs=1e-6) for error in found.errors.values())
    assert all(one["within_goal"] == 1 for one in summary([found]).values())


def test_the_servers_costs_are_found(profile):
    found = fit_serving([served(profile, rate=0.5)], [served(profile, rate=40)], profile)
    assert found.seconds_per_step == pytest.approx(SERVING.seconds_per_step, rel=0.1)
    assert found.seconds_per_chunk == pytest.approx(SERVING.seconds_per_chunk, rel=0.2)
    assert found.seconds_per_request == pytest.approx(SERVING.seconds_per_request, rel=0.2)


def test_prompts_of_the_test_are_none_of_the_profiles():
    test, profiled = (prompts_by_kind(100, is_test=is_test) for is_test in (True, False))
    assert all(len(test[kind]) == 100 for kind in KINDS)
    assert not {one for some in test.values() for one in some} & {one for some in profiled.values() for one in some}
    assert len(set(mixed_prompts(400, is_test=True))) == 400
