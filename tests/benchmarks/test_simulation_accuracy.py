"""A served run that the simulator itself has written is simulated without an error, and its server's costs are found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.simulation_accuracy.__main__ import CALIBRATIONS, LOADS, MOST, _profile, prompts_of
from benchmarks.simulation_accuracy.comparison import ServedRun, compare, fit_serving, summary
from benchmarks.simulation_accuracy.prompts import KINDS, mixed_prompts, prompts_by_kind
from benchmarks.simulation_accuracy.runs import NUM_WARMUPS
from benchmarks.simulation_accuracy.speed import AS_PROFILED, Slowness, slowness_of
from forerun.config.settings import EngineSettings
from forerun.errors import ConfigError
from forerun.plan.load import Load
from forerun.plan.simulation.profiled import ServingCost, profiled_engine
from forerun.plan.simulation.requests import SimulatedRequest, synthetic_requests
from forerun.plan.step_times import StepSample
from tests.plan.simulation.profiles import a_profile

SERVING = ServingCost(
    seconds_per_request=0.004, seconds_per_step=0.0005, seconds_per_chunk=0.0003, seconds_per_idle_request=0.002
)
PROMPTS = [[number % 97] * (20 + number % 7) for number in range(30)]


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    return a_profile(tmp_path_factory.mktemp("profile"))


def served(profile, config="plain", *, rate=15.0, slowness=AS_PROFILED, number=0):
    """What `forerun bench serve` would say of a server that is just as simulated."""
    arrivals = [one.arrival for one in synthetic_requests(Load(rate=rate, isl=20, osl=30), len(PROMPTS))]
    kinds = [("code", "chat")[number % 2] for number in range(len(PROMPTS))]
    requests = [
        SimulatedRequest(arrival=arrival, num_prompt_tokens=len(ids), num_output_tokens=30, prompt_ids=ids, kind=kind)
        for arrival, ids, kind in zip(arrivals, PROMPTS, kinds, strict=True)
    ]
    now = replace(profile, step_times=slowness.of(profile.step_times))
    engine = profiled_engine(now, config, serving=SERVING)
    records = engine.simulate(requests).requests
    first = records[0].arrival
    return ServedRun(
        config=config,
        load="a load",
        round=number,
        share=0.5,
        gigabytes_per_second=50.0,
        slowness=slowness,
        prompts=PROMPTS,
        kinds=kinds,
        input_lens=[len(ids) for ids in PROMPTS],
        output_lens=[one.num_output_tokens for one in records],
        start_times=[100 + one.arrival - first for one in records],
        ttfts=[one.ttft for one in records],
        latencies=[one.e2el for one in records],
    )


@pytest.mark.parametrize("config", ["plain", "suffix", "auto"])
@pytest.mark.parametrize("slowness", [AS_PROFILED, Slowness(memory=1.3, arithmetic=0.9)])
def test_what_is_simulated_right_has_no_error(profile, config, slowness):
    run = served(profile, config, slowness=slowness)
    found = compare([run, replace(run, round=1)], profile, SERVING, seeds=[0])
    assert all(error == pytest.approx(0, abs=1e-6) for error in found.errors.values())
    assert len(found.errors_by_round) == 2
    assert all(one["within_goal"] == 1 for one in summary([found]).values())


@pytest.mark.parametrize(
    ("config", "most"), [("plain", 0.03), pytest.param("auto", 0.05, marks=pytest.mark.slow)]
)  # its lengths jump with the times
def test_the_costs_of_a_server_are_found_from_loads_that_differ_and_simulate_them_right(profile, config, most):
    calibrations = [[served(profile, config, rate=rate)] for rate in (0.5, 8, 30)]
    found = fit_serving(calibrations, profile)
    assert found.seconds_per_step == pytest.approx(SERVING.seconds_per_step, abs=0.0002)
    assert found.seconds_per_chunk == pytest.approx(SERVING.seconds_per_chunk, abs=0.0001)
    for runs in calibrations:
        errors = compare(runs, profile, found, seeds=[0]).errors
        assert all(abs(errors[name]) < most for name in ("mean_tpot", "mean_ttft"))
        unserved = compare(runs, profile, ServingCost(), seeds=[0]).errors
        assert unserved["mean_tpot"] < -0.05


def test_errors_that_come_and_go_with_the_rounds_are_told_from_those_that_stay(profile):
    run = served(profile)
    longer = replace(
        run, round=1, latencies=[1.2 * one for one in run.latencies], ttfts=[1.2 * one for one in run.ttfts]
    )
    found = summary([compare([run, longer], profile, SERVING, seeds=[0])])["mean_ttft"]
    assert found["between_rounds"] == pytest.approx((1 - 1 / 1.2) / 2**0.5, rel=1e-3)
    assert found["bias"] == pytest.approx(-found["mean"])


@pytest.mark.parametrize("now", [Slowness(memory=0.8, arithmetic=1.1), Slowness(memory=1.6, arithmetic=1.0)])
def test_a_probe_tells_slow_memory_from_slow_arithmetic(profile, now):
    def sample(**shape):
        return StepSample(**shape, seconds=now.of(profile.step_times).seconds(**shape))

    decoding = [sample(num_rows=size, num_sequences=size, num_context_tokens=200 * size) for size in (1, 4, 8)]
    prompts = [sample(num_rows=0, num_sequences=0, num_context_tokens=0, num_prompt_rows=rows) for rows in (128, 512)]
    found = slowness_of(decoding, prompts, profile.step_times)
    assert (found.memory, found.arithmetic) == pytest.approx((now.memory, now.arithmetic))


def test_a_probe_whose_parts_make_no_sense_takes_both_for_equally_slow(profile):
    decoding = [StepSample(num_rows=1, num_sequences=1, num_context_tokens=200, seconds=1e-9)]
    prompts = [StepSample(num_rows=0, num_sequences=0, num_context_tokens=0, num_prompt_rows=512, seconds=1.0)]
    found = slowness_of(decoding, prompts, profile.step_times)
    assert found.memory == found.arithmetic > 0


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_server_gets_no_prompt_twice(number):
    count = MOST + NUM_WARMUPS
    loads = [*LOADS, *CALIBRATIONS]
    prompts = [prompt for load in loads for prompt in prompts_of(load, number, count)]
    assert len(set(prompts)) == len(prompts) == count * len(loads)
    assert count % len(KINDS) == 0, "each load begins with the first kind"


def test_runs_do_not_go_on_with_a_profile_of_another_machine(tmp_path):
    a_profile(tmp_path)
    with pytest.raises(ConfigError, match=r"of another machine .*a machine"):
        _profile(None, EngineSettings(model="tiny"), tmp_path, quick=True)


def test_prompts_of_the_test_are_none_of_the_profiles():
    test, profiled = (prompts_by_kind(100, is_test=is_test) for is_test in (True, False))
    assert all(len(test[kind]) == 100 for kind in KINDS)
    assert not {one for some in test.values() for one in some} & {one for some in profiled.values() for one in some}
    assert len(set(mixed_prompts(400, is_test=True))) == 400
