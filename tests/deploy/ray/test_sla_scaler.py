"""Replicas by load, over a day in the simulator: enough for the SLA, fewer than its peak takes all day."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from forerun.deploy.ray.load_meter import MeasuredInterval
from forerun.deploy.ray.planner_policy import PlannerPolicy, counts_by_replica
from forerun.deploy.ray.sla_scaler import SlaScaler
from forerun.errors import ConfigError
from forerun.plan.confirmation import simulated
from forerun.plan.deployment_planner import PlanningOptions, plan_engines
from forerun.plan.fleet_plan import KEEP_BELOW
from forerun.plan.load import Load
from forerun.plan.sla import Sla
from forerun.plan.step_times import DraftingCost
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


def test_replicas_that_draft_nothing_are_planned_so_and_scale():
    one = scaler(options=PlanningOptions(methods=()))
    decisions = [one.decide(measured(load_at(hour), 1.0), running=3) for hour in (0, 2, 4)]
    assert all(decision.plan.policy.speculation is None for decision in decisions)
    drafting = scaler().decide(measured(load_at(0)), running=3)
    assert decisions[0].plan.acceptance_length == pytest.approx(1)
    assert drafting.plan.acceptance_length > 1.01


def test_acceptance_is_not_learnt_where_the_planner_drafts_nothing():
    slow = replace(PROFILE, drafting={name: DraftingCost(seconds_per_step=1.0) for name in PROFILE.configs})
    one = SlaScaler(slow, SLA, most=16, interval=7200.0, options=OPTIONS)
    for hour in (0, 2):
        assert one.decide(measured(load_at(hour), 1.7), running=3).plan.acceptance_length == pytest.approx(1)


def test_drafts_that_add_nothing_are_planned_so_until_they_do_again():
    one = scaler(predictor="constant")
    lengths = [1.0] * 4 + [1.0 + 2.0 * (PROFILE.acceptance["suffix"].mean_accept_length - 1.0)] * 8
    planned = [one.decide(measured(load_at(0), length), running=3).plan.acceptance_length for length in lengths]
    assert planned[0] > 1.0
    assert planned[1:4] == [1.0] * 3
    assert planned[-1] > 1.0


@pytest.mark.parametrize("length", [1.0, 1.5])
def test_what_rounding_leaves_of_a_plan_without_drafts_teaches_nothing(length):
    one = scaler(predictor="constant", options=PlanningOptions(methods=()))
    for number in range(48):
        place = number // 3
        load = Load(rate=7.0 + 1.7 * place, isl=150 + 43 * place, osl=20 + 7 * place, prefix_hit_rate=0.5)
        assert one.decide(measured(load, length), running=1).plan.policy.speculation is None


def test_a_step_down_leaves_replicas_that_the_load_needs():
    one, running = scaler(), 1
    for rate in [400.0] * 6 + [60.0] * 8:
        decision = one.decide(measured(Load(rate=rate, isl=200, osl=60)), running=running)
        running = decision.replicas
    busy = scaler(predictor="constant").decide(measured(Load(rate=60.0, isl=200, osl=60)), running=1)
    assert running >= busy.replicas > 1


def test_replicas_are_given_up_by_the_last_load_where_the_forecast_is_lower():
    falling = scaler()
    for rate in [200.0] * 6 + [60.0] * 2:
        decision = falling.decide(measured(Load(rate=rate, isl=200, osl=60)), running=16)
    assert decision.forecast.rate < 60.0
    present = replace(decision.forecast, rate=60.0)
    assert falling._with_count(PROFILE, present, decision.plan, decision.replicas).utilization < KEEP_BELOW


def test_a_trend_of_lengths_beyond_what_the_engine_takes_is_not_followed():
    one = scaler()
    for isl in range(100, PROFILE.max_model_len - 60, PROFILE.max_model_len // 8):
        forecast = one.decide(measured(Load(rate=1, isl=isl, osl=50)), running=1).forecast
        assert forecast.isl + forecast.osl <= PROFILE.max_model_len


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
        profile=str(tmp_path / "profile"),
        sla="ttft=500ms,itl=20ms",
        interval=60.0,
        predictor="constant",
        methods=["suffix"],
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
    for clock.now in (0.0, 60.0):
        assert planned(one, context(0))[0] == 1
    clock.now = 120.0
    replicas, said = planned(one, context(60 * 50))
    assert replicas > 1
    assert said["replicas"] == replicas
    assert said["forecast"]["rate"] == pytest.approx(50.0)


@pytest.mark.parametrize("heard_at", [0.0, 30.0])
def test_what_replicas_counted_before_a_new_policy_heard_them_is_no_arrival(policy, heard_at):
    one, clock = policy
    lived = 100_000
    for clock.now in (0.0, 30.0, 60.0):
        assert planned(one, context(lived if clock.now >= heard_at else 0))[1] == {}
    clock.now = 120.0
    _, said = planned(one, context(lived + 60 * 20))
    assert said["forecast"]["rate"] == pytest.approx(20.0)


def test_the_policy_plans_with_the_drafts_of_the_replicas_alone(policy, tmp_path):
    plain = PlannerPolicy(str(tmp_path / "profile"), "ttft=500ms,itl=20ms", 60.0, "constant", [])
    for one, methods in ((policy[0], {"suffix", None}), (plain, {None})):
        for number in range(3):
            policy[1].now += 60.0
            _, said = planned(one, context(600 * number))
        assert (said["speculative_config"] or {}).get("method") in methods


def test_a_load_that_cannot_be_planned_keeps_the_replicas(policy):
    one, clock = policy
    for clock.now in (0.0, 60.0):
        planned(one, context(0, target=3))
    clock.now = 120.0
    bad = context(6000, target=3)
    bad.raw_metrics["prompt_tokens"] = {"replica0": [SimpleNamespace(value=1e9)]}
    replicas, said = planned(one, bad)
    assert replicas == 3
    assert "max_model_len" in said["error"]


def test_a_planner_that_fails_keeps_the_replicas_and_plans_again(policy, monkeypatch):
    one, clock = policy
    for clock.now in (0.0, 60.0):
        planned(one, context(0, target=3))
    with monkeypatch.context() as patch:
        patch.setattr(SlaScaler, "decide", lambda *_, **__: 1 / 0)
        clock.now = 120.0
        assert planned(one, context(6000, target=3)) == (3, {"error": "ZeroDivisionError: division by zero"})
    clock.now = 180.0
    assert planned(one, context(12000, target=3))[1]["forecast"]["rate"] == pytest.approx(100.0)


def test_the_newest_value_of_each_series_counts():
    raw = {"finished": {"a": [SimpleNamespace(value=1.0), SimpleNamespace(value=2.0)], "b": []}}
    assert counts_by_replica(raw)["a"].finished == 2.0
    assert "b" not in counts_by_replica(raw)


def test_a_replica_that_has_told_no_counters_is_not_one_whose_counters_are_zero():
    assert counts_by_replica({"running_requests": {"a": [SimpleNamespace(value=3.0)]}}) == {}
