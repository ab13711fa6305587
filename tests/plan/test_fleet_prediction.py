"""What is predicted of engines for prompts and others for answers, held against simulated ones."""

from dataclasses import replace

import numpy as np
import pytest

from forerun.engine.simulation import SimulationSettings, linear_decode_seconds
from forerun.plan.capacity import Routing
from forerun.plan.fleet_prediction import FleetPrediction
from forerun.plan.load import Load
from forerun.plan.serving_policies import serving_policies
from forerun.plan.simulation.fleet import Fleet, Transfer
from forerun.plan.simulation.requests import synthetic_requests
from forerun.plan.simulation.simulate import simulate
from forerun.plan.sla import LATENCIES, Sla
from tests.plan.worlds import engine_model

LOAD = Load(rate=60, isl=100, osl=50)
ENGINE = engine_model(max_num_seqs=16)


def test_an_answer_of_one_token_ends_with_its_first_one() -> None:
    fleet = FleetPrediction(engine=ENGINE, load=replace(LOAD, osl=1.0), transfer=Transfer())
    (policy,) = (one for one in serving_policies(ENGINE, [None], LOAD) if one.has_all_places)
    busy = fleet.apart(policy, np.array([1, 2, 8]), 1)
    assert busy.e2el.mean == pytest.approx(busy.ttft.mean)
    assert list(busy.is_stable) == list(np.isfinite(busy.ttft.mean))
    assert busy.e2el.variance[2] == pytest.approx(busy.ttft.variance[2])


@pytest.mark.parametrize(
    ("load", "prefill", "decode", "seconds", "sla"),
    [
        (Load(rate=10, isl=300, osl=200, osl_cv=1.0), 2, 1, 0.0, Sla(tpot=0.006)),
        (Load(rate=10, isl=300, osl=200, osl_cv=1.0), 2, 4, 0.0, Sla(tpot=0.005)),
        (Load(rate=10, isl=300, osl=100, osl_cv=0.5), 2, 2, 0.05, Sla(tpot=0.006, icl=0.006)),
        (Load(rate=2, isl=600, osl=10, isl_cv=1.0), 2, 1, 0.0, Sla(ttft=0.15)),
        (Load(rate=20, isl=600, osl=10, isl_cv=1.0), 4, 2, 0.0, Sla(ttft=0.15)),
        (Load(rate=6, isl=400, osl=100, isl_cv=1.0, osl_cv=1.0), 2, 2, 0.0, Sla(ttft=0.1, tpot=0.005)),
    ],
)
def test_engines_apart_do_what_simulated_ones_do_where_lengths_spread(
    load: Load, prefill: int, decode: int, seconds: float, sla: Sla
) -> None:
    """Answers of any length have the same time per token; long prompts take longer to their first one than short ones."""
    transfer = Transfer(seconds=seconds)
    engine = engine_model()
    (policy,) = (one for one in serving_policies(engine, [None], load) if one.has_all_places)
    at = FleetPrediction(engine=engine, load=load, transfer=transfer).apart(policy, prefill, decode)
    found = simulate(
        SimulationSettings(decode_seconds=linear_decode_seconds, max_model_len=engine.max_model_len),
        synthetic_requests(load, 400, seed=3),
        fleet=Fleet(replicas=decode, prefill_replicas=prefill, routing="least-requests", transfer=transfer),
    )
    for name in LATENCIES:
        latency, values = getattr(at, name), [getattr(one, name) for one in found.requests if one.num_output_tokens > 1]
        assert latency.mean[0] == pytest.approx(np.mean(values), rel=0.15), name
        assert latency.quantile(0.95)[0] == pytest.approx(np.quantile(values, 0.95), rel=0.2), name
    assert at.attainment(sla)[0] == pytest.approx(found.attainment(sla), abs=0.05)


@pytest.mark.parametrize("load", [Load(rate=20, isl=600, osl=10), Load(rate=12, isl=600, osl=10, isl_cv=0.5)])
def test_prompts_that_are_sent_at_random_wait_in_a_line_for_each_engine(load: Load) -> None:
    engine = engine_model()
    (policy,) = (one for one in serving_policies(engine, [None], load) if one.has_all_places)
    fleet = FleetPrediction(engine=engine, load=load, transfer=Transfer(), routing=Routing.RANDOM)
    at = fleet.apart(policy, 4, 4)
    found = simulate(
        SimulationSettings(decode_seconds=linear_decode_seconds, max_model_len=engine.max_model_len),
        synthetic_requests(load, 2000, seed=3),
        fleet=Fleet(replicas=4, prefill_replicas=4, routing="random", transfer=Transfer()),
    )
    ttfts = [one.ttft for one in found.requests]
    assert at.ttft.mean[0] == pytest.approx(np.mean(ttfts), rel=0.15)
    assert at.ttft.quantile(0.95)[0] == pytest.approx(np.quantile(ttfts, 0.95), rel=0.2)
    in_one_line = replace(fleet, routing=Routing.LEAST_REQUESTS).apart(policy, 4, 4)
    assert in_one_line.ttft.mean[0] < at.ttft.mean[0]
