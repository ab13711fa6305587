"""Dynamo's own replay and planner against ours, fed with the same profile.

Dynamo has an environment of its own: python -m benchmarks.peers install dynamo.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import forerun
from forerun.engine.speculation import FixedLength
from forerun.executor.simulated import drafting_is_free
from forerun.executor.simulated_text import ConditionalAcceptance
from forerun.plan.acceptance import AcceptanceProfile
from forerun.plan.capacity import max_rate
from forerun.plan.deployment_plan import Layout
from forerun.plan.draft_lengths import Speculation, chain_yields, fixed_lengths, step_table
from forerun.plan.dynamo_files import PrefillPoint, write_mocker
from forerun.plan.fleet_plan import FREE_TRANSFER, FleetSearch, plan_fleet
from forerun.plan.load import Load
from forerun.plan.serving_policies import ServingPolicy, serving_policies
from forerun.plan.simulation.profiled import profiled_engine
from forerun.plan.simulation.requests import synthetic_requests
from forerun.plan.sla import Sla
from tests.plan.profiles import fake_profile
from tests.plan.worlds import LinearStepTimes, engine_model
from tests.slow.environments import interpreter_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).with_name("dynamo_planner.py")
RATES = (0.8, 0.7, 0.6)
PROFILE = fake_profile()
LENGTHS = {"isl": 200, "osl": 100}


def replayed(folder, load, count, num_draft_tokens):
    """What Dynamo's replay says of a load on one engine with the profile's step times, in ms."""
    python = interpreter_of("dynamo")
    table, trace, report = folder / "mocker.npz", folder / "trace.jsonl", folder / "report.json"
    step_times = PROFILE.step_times
    write_mocker(
        table,
        step_times,
        [PrefillPoint(isl=isl, ttft_seconds=step_times.ttft_seconds(isl)) for isl in (16, 64, 200, 400, 800, 1600)],
        num_draft_tokens=num_draft_tokens,
        contexts=[200, 225, 250, 300],
        num_sequences=range(1, PROFILE.max_num_seqs + 1),
        max_kv_tokens=PROFILE.num_blocks * PROFILE.block_size,
    )
    lines = [
        {
            "timestamp": 1e3 * one.arrival,
            "input_length": one.num_prompt_tokens,
            "output_length": one.num_output_tokens,
            "hash_ids": [number],
        }
        for number, one in enumerate(synthetic_requests(load, count, seed=1))
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    engine = {
        "engine_type": "vllm",
        "num_gpu_blocks": PROFILE.num_blocks,
        "block_size": PROFILE.block_size,
        "max_num_seqs": PROFILE.max_num_seqs,
        "max_num_batched_tokens": PROFILE.max_num_batched_tokens,
        "enable_prefix_caching": False,
        "planner_profile_data": str(table),
    }
    if num_draft_tokens:
        rates = ",".join(map(str, RATES[:num_draft_tokens]))
        engine |= {"aic_nextn": num_draft_tokens, "aic_nextn_accept_rates": rates}
    options = ["--num-workers", "1", "--replay-mode", "offline", "--router-mode", "round_robin"]
    options += ["--extra-engine-args", json.dumps(engine), "--report-json", report]
    subprocess.run([python, "-m", "dynamo.replay", trace, *options], check=True, capture_output=True)
    return json.loads(report.read_text())


def simulated(load, count, num_draft_tokens):
    """The same by our simulator; drafting takes no time there, as in Dynamo's."""
    engine = profiled_engine(PROFILE)
    settings = replace(
        engine.settings,
        drafting=ConditionalAcceptance(RATES) if num_draft_tokens else None,
        draft_seconds=drafting_is_free,
        enable_prefix_caching=False,
    )
    control = FixedLength(num_speculative_tokens=num_draft_tokens)
    planned = replace(engine, settings=settings, make_control=lambda: control)
    return planned.simulate(synthetic_requests(load, count, seed=1))


@pytest.mark.parametrize("rate", [1.0, 8.0])
@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_both_simulators_agree_where_both_model_the_same(tmp_path, rate, num_draft_tokens):
    load = Load(rate=rate, **LENGTHS)
    theirs, ours = replayed(tmp_path, load, 300, num_draft_tokens), simulated(load, 300, num_draft_tokens)
    tpot, e2el, ttft = (1e3 * ours.latencies(name).mean for name in ("tpot", "e2el", "ttft"))
    # Dynamo's mocker computes a prompt in a pass of its own, whose fixed cost comes on top of the decoding step's
    for found, expected in ((theirs["mean_tpot_ms"], tpot), (theirs["mean_e2e_latency_ms"], e2el)):
        assert 0.97 * expected <= found <= 1.15 * expected
    assert theirs["output_throughput_tok_s"] == pytest.approx(ours.output_throughput, rel=0.03)
    # that pass writes no token: the first one takes a step more
    step = 1e3 * PROFILE.step_times.seconds(
        num_rows=1 + num_draft_tokens, num_sequences=1, num_context_tokens=LENGTHS["isl"]
    )
    assert theirs["mean_ttft_ms"] - step == pytest.approx(ttft, rel=0.15)


@pytest.mark.parametrize("num_draft_tokens", [0, 2])
@pytest.mark.parametrize("itl_ms", [4.0, 6.0, 12.0])
def test_the_planners_formula_is_ours_for_means(tmp_path, itl_ms, num_draft_tokens):
    """The largest batch within the mean ITL, and its requests per second; ours has quantiles and waits besides."""
    load = Load(rate=10, **LENGTHS)
    engine = engine_model(LinearStepTimes(base=0.004, per_row=0.0002, per_context_token=1e-7, per_prompt_row=0.0))
    acceptance = AcceptanceProfile(method="draft", conditional=RATES)
    yields = chain_yields(acceptance, 2)
    drafter = Speculation(name="draft", acceptance=acceptance, yields=yields) if num_draft_tokens else None
    context = load.isl + load.osl / 2
    table = step_table(engine.step_times, drafter, max_batch_size=64, context=context)
    seconds = table.seconds[:, num_draft_tokens]
    # at several contexts: batch size and KV tokens would otherwise be the same feature
    steps = [
        (
            size,
            round(size * some),
            0,
            step_table(engine.step_times, drafter, max_batch_size=size, context=some).seconds[-1, num_draft_tokens],
        )
        for size in (1, 2, 4, 8, 16, 32, 64)
        for some in (100, 200, 400)
    ]
    rate, found_itl = asked(
        tmp_path,
        "decode",
        steps,
        itl=itl_ms,
        context_length=context,
        osl=load.osl,
        max_kv_tokens=engine.num_blocks * engine.block_size,
        max_num_seqs=engine.max_num_seqs,
        accept_length=float(table.expected[num_draft_tokens]),
    )
    per_token = seconds / table.expected[num_draft_tokens]
    sizes = np.arange(1, 65)
    within = per_token * 1e3 <= itl_ms
    if not within.any():
        assert found_itl > itl_ms  # it plans on with one sequence, and logs
        return
    size = int(sizes[within][-1])
    assert rate == pytest.approx(size / (load.osl * per_token[size - 1]), rel=0.02)
    policy = ServingPolicy(
        speculation=drafter, lengths=fixed_lengths(64, num_draft_tokens), max_num_seqs=64, table=table
    )
    half = max_rate(engine, policy, load, Sla(tpot=itl_ms / 1e3, attainment=0.5))
    assert half == pytest.approx(rate, rel=0.2)
    assert max_rate(engine, policy, load, Sla(tpot=itl_ms / 1e3, attainment=0.99)) < half


def asked(folder, question, steps=(), **arguments):
    """What Dynamo's planner answers."""
    path = folder / "case.json"
    path.write_text(json.dumps({"ask": question, "steps": list(steps), "with": arguments}))
    run = subprocess.run([interpreter_of("dynamo"), SCRIPT, path], check=True, capture_output=True, text=True)
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("base", "per_token", "isl", "budget"),
    [
        (0.002, 0.001, 1000, 4096),  # of its own tests: 0.001 s a token and 0.002 s
        (0.004, 0.0001, 3000, 2048),  # in chunks
        (0.004, 0.0001, 4096, 2048),
    ],
)
def test_a_prefill_engine_takes_as_many_requests_as_dynamo_says(tmp_path, base, per_token, isl, budget):
    steps = [(0, 0, tokens, base + per_token * tokens) for tokens in (100, 500, 1000, 2000, 4000)]
    rate, ttft_ms = asked(tmp_path, "prefill", steps, ttft_sla=1e6, isl=isl, max_num_batched_tokens=budget)
    world = LinearStepTimes(base=base, per_row=0.0, per_prompt_row=per_token)
    engine = engine_model(world, max_num_batched_tokens=budget, num_blocks=10_000)
    load = Load(rate=rate / 2, isl=isl, osl=10)
    (policy, *_) = serving_policies(engine, [None], load)
    found = FleetSearch(engine, load, Sla(ttft=1e3), FREE_TRANSFER).at(policy, 1, 8)
    assert found.prefill_utilization == pytest.approx(0.5, rel=0.01)
    for demand in (0.7, 1.5, 3.2):  # engines with which prompts do not pile up: its ceil(demand / rate)
        busy = demand * found.prefill_utilization / load.rate
        assert math.ceil(busy) == math.ceil(demand / rate)
    idle = replace(load, rate=1e-6)
    assert 1e3 * FleetSearch(engine, idle, Sla(ttft=1e3), FREE_TRANSFER).at(policy, 1, 1).ttft.mean[0] == pytest.approx(
        ttft_ms, rel=0.01
    )


@pytest.mark.parametrize(("isl", "osl", "itl_ms"), [(200, 100, 6.0), (400, 50, 8.0), (100, 200, 5.0)])
def test_an_aggregated_engine_takes_about_as_many_requests_as_dynamo_says(tmp_path, isl, osl, itl_ms):
    """Prompts share its steps; ours holds the median, and waits, against the limits."""
    world = LinearStepTimes(base=0.004, per_row=0.0, per_context_token=1e-7, per_prompt_row=0.00002)
    engine = engine_model(world)
    steps = [
        (size, size * context, prompt, 0.004 + 1e-7 * size * context + 0.00002 * prompt)
        for size in (1, 4, 16, 64)
        for context in (100, 200, 400)
        for prompt in (0, 64, 512)
    ]
    rate, _, found_itl = asked(
        tmp_path,
        "aggregated",
        steps,
        isl=isl,
        osl=osl,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        ttft_sla=1e6,
        itl_sla=itl_ms,
        max_kv_tokens=engine.num_blocks * engine.block_size,
        max_num_seqs=engine.max_num_seqs,
    )
    assert found_itl <= itl_ms
    load = Load(rate=10, isl=isl, osl=osl)
    policy = max(serving_policies(engine, [None], load), key=lambda one: one.max_num_seqs)
    half = max_rate(engine, policy, load, Sla(tpot=itl_ms / 1e3, attainment=0.5))
    assert half == pytest.approx(rate, rel=0.25)


@pytest.mark.parametrize("budget", [4, 6, 9])
def test_a_budget_is_split_at_least_as_well_as_dynamo_splits_it(tmp_path, budget):
    """It scales both counts down alike; ours tries the splits."""
    world = LinearStepTimes(base=0.004, per_row=0.0001, per_prompt_row=0.0001)
    engine, load = engine_model(world), Load(rate=60, isl=300, osl=60)
    sla = Sla(ttft=0.2, tpot=0.02)
    enough = plan_fleet(engine, [], load, sla, layouts=(Layout.DISAGGREGATED,)).plan
    split = asked(
        tmp_path,
        "split",
        num_p=3 * enough.prefill_replicas,
        num_d=3 * enough.replicas,
        p_gpu=1,
        d_gpu=1,
        min_gpus=-1,
        max_gpus=budget,
        min_endpoint=1,
    )
    assert sum(split) <= budget
    ours = plan_fleet(engine, [], load, sla, layouts=(Layout.DISAGGREGATED,), most_engines=budget).plan
    assert ours.num_engines <= budget
    search = FleetSearch(engine, load, sla, FREE_TRANSFER)
    theirs = max(
        (search.at(policy, *split) for policy in serving_policies(engine, [None], load)), key=lambda one: one.attainment
    )
    assert ours.attainment >= min(theirs.attainment, sla.attainment) - 1e-6


@pytest.mark.parametrize("name", ["arima", "prophet"])
def test_predictors_of_other_libraries_follow_a_trend(name):
    script = f"""
from forerun.plan.predictors import make_predictor
predictor = make_predictor({name!r})
for number in range(40):
    predictor.add(10.0 + number + 0.3 * (number % 3))
print("predicted", predictor.predict(), predictor.predict(3))
"""
    environment = os.environ | {"PYTHONPATH": str(Path(forerun.__file__).parents[1])}
    python = interpreter_of("dynamo")
    run = subprocess.run([python, "-c", script], check=True, capture_output=True, text=True, env=environment)
    (line,) = (line for line in run.stdout.splitlines() if line.startswith("predicted"))
    one, three = map(float, line.split()[1:])
    assert one == pytest.approx(50.3, abs=1.0)
    assert three == pytest.approx(52.3, abs=1.5)
