"""Replicas by load, over a day in the simulator: enough for the SLA, fewer than its peak takes all day."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace

import pytest

from forerun.deploy.ray.load_meter import MeasuredInterval
from forerun.deploy.ray.planner_policy import PlannerPolicy, counts_by_replica
from forerun.deploy.ray.sla_scaler import SlaScaler
from forerun.errors import ConfigError
from forerun.plan.confirmation import simulated
from forerun.plan.deployment_planner import PlanningOptions, plan_engines
from forerun.plan.load import Load
from forerun.plan.sla import Sla
from tests.plan.profiles import fake_profile

PROFILE = fake_profile()
SLA = Sla(ttft=0.5, tpot=0.02, attainment=0.9)
OPTIONS = PlanningOptions(methods=("suffix",))
HOURS, STEP = 24, 2


def load_at(hour):
    return Load(rate=30 + 20 * math.sin(2 * math.pi * hour / HOURS), isl=200, osl=60, isl_cv=0.5, osl_cv=0.5)


def measured(load, tokens_per_step=None):
    return MeasuredInterval(load=load, tokens_per_step=tokens_per_step, num_steps=1000 if tokens_per_step else 0)


def scaler(**changes):
    return SlaScaler(PROFILE, SLA, **{"least": 1, "most": 16, "interval": 7200.0, "options": OPTIONS} | changes)


def test_a_day_keeps_its_sla_with_fewer_engine_hours_than_its_peak_takes():
    one, running, hours, attained, total = scaler(), 3, [], 0.0, 0.0
    for hour in range(0, HOURS, STEP):
        decision = one.decide(measured(load_at(hour)), running=running)
        running = decision.replicas
        hours.append(running)
        load = load_at(hour + STEP)  # what comes when it was decided
        result = simulated(PROFILE, decision.plan, load, num_requests=100, seed=hour)
        attained += result.attainment(SLA) * load.rate
        total += load.rate
    peak = plan_engines(PROFILE, load_at(HOURS / 4), SLA, OPTIONS).plan.replicas
    assert attained / total >= SLA.attainment - 0.02
    assert sum(hours) <= 0.85 * len(hours) * peak
    assert len(set(hours)) > 2


def test_nothing_measured_needs_the_fewest():
    assert scaler(least=2).decide(measured(None), running=5).replicas == 2


def test_never_more_than_the_most_even_where_the_sla_is_missed():
    decision = scaler(most=2).decide(measured(Load(rate=500, isl=200, osl=60)), running=1)
    assert decision.replicas == 2
    assert decision.plan.attainment < SLA.attainment


def test_replicas_that_run_are_kept_while_the_others_would_be_busy():
    load = load_at(6)
    needed = scaler().decide(measured(load), running=1).replicas
    kept = scaler().decide(measured(load), running=needed + 1).replicas
    assert needed <= kept <= needed + 1
    assert scaler().decide(measured(Load(rate=0.1, isl=200, osl=60)), running=8).replicas == 1


def test_acceptance_that_is_better_than_profiled_needs_no_more_engines_and_worse_no_fewer():
    def after(ratio):
        one = scaler(predictor="constant")
        first = one.decide(measured(load_at(6)), running=1)
        length = first.plan.acceptance_length * ratio
        one.decide(measured(load_at(6), length), running=1)
        return one.decide(measured(load_at(6), length), running=1)

    worse, better = after(0.7), after(1.1)
    assert worse.replicas >= better.replicas
    assert worse.plan.acceptance_length < better.plan.acceptance_length


def test_a_load_that_does_not_fit_the_profile_is_said():
    with pytest.raises(ConfigError, match="max_model_len"):
        scaler(predictor="constant").decide(measured(Load(rate=1, isl=10**5, osl=60)), running=1)


class Clock:
    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def policy(tmp_path, monkeypatch):
    fake_profile(tmp_path / "profile")
    clock = Clock()
    monkeypatch.setattr("forerun.deploy.ray.planner_policy.time", clock)
    one = PlannerPolicy(
        profile=str(tmp_path / "profile"), sla="ttft=500ms,itl=20ms", interval=60.0, predictor="constant"
    )
    return one, clock


def context(finished, target=1):
    def series(value):
        return {f"replica{n}": [SimpleNamespace(value=value / target)] for n in range(target)}

    stats = {"finished": finished, "prompt_tokens": 200 * finished, "answer_tokens": 60 * finished}
    return SimpleNamespace(
        raw_metrics={name: series(value) for name, value in stats.items()},
        target_num_replicas=target,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=8,
    )


def planned(policy, given):
    """What the policy says once its thread has planned, which may be within the first call."""
    answer = policy(given)
    while policy._planning is not None:
        time.sleep(0.001)
        answer = policy(given)
    return answer


def test_the_policy_keeps_what_there_is_until_it_has_planned(policy):
    one, clock = policy
    assert one(context(0))[0] == 1
    clock.now = 60.0
    replicas, said = planned(one, context(60 * 50))
    assert replicas > 1
    assert said["replicas"] == replicas
    assert said["forecast"]["rate"] == pytest.approx(50.0)


def test_a_load_that_cannot_be_planned_keeps_the_replicas(policy):
    one, clock = policy
    one(context(0, target=3))
    clock.now = 60.0
    bad = context(6000, target=3)
    bad.raw_metrics["prompt_tokens"] = {"replica0": [SimpleNamespace(value=1e9)]}
    replicas, said = planned(one, bad)
    assert replicas == 3
    assert "max_model_len" in said["error"]


def test_the_newest_value_of_each_series_counts():
    raw = {"finished": {"a": [SimpleNamespace(value=1.0), SimpleNamespace(value=2.0)], "b": []}}
    assert counts_by_replica(raw)["a"].finished == 2.0
    assert "b" not in counts_by_replica(raw)


def test_a_replica_that_has_told_no_counters_is_not_one_whose_counters_are_zero():
    assert counts_by_replica({"running_requests": {"a": [SimpleNamespace(value=3.0)]}}) == {}
