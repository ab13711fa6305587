"""The plan that a tuning leaves: read back, and emitted."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import yaml

from forerun.plan.deployment_plan import DeploymentPlan
from forerun.plan.emit.emission import EmitRequest
from forerun.plan.emit.systems import SYSTEMS, emit
from forerun.plan.sla import Sla
from forerun.plan.tuning.offered_load import OfferedLoad
from forerun.plan.tuning.tuned_plan import tuned_plan
from tests.plan.deployment_plans import PLAIN_PLAN
from tests.plan.tuning.figures import figures
from tests.plan.tuning.test_tuning_report import report

CLIENTS = OfferedLoad(concurrency=4)
SUFFIX = {"suffix": [figures(200, attainment=0.9)], "plain": [figures(100)]}


def planned(best="suffix", offered=CLIENTS, rounds=SUFFIX, **changes):
    return tuned_plan(
        report(best, rounds, **changes), offered=offered, prompt_lengths=[10, 30], engine=PLAIN_PLAN.engine
    )


def test_the_plan_is_the_configuration_that_was_found(tmp_path):
    found = planned()
    assert found.speculative_config == {"method": "suffix"}
    assert (found.model, found.replicas, found.engine) == ("tiny", 1, PLAIN_PLAN.engine)
    assert planned("plain").speculative_config is None
    assert DeploymentPlan.load_file(found.save(tmp_path)) == found
    assert found.predicted["output_tokens_per_second"] == pytest.approx(200)
    assert found.predicted["ttft_p95_ms"] == pytest.approx(100)


def test_clients_are_written_as_the_rate_that_they_had_answered():
    found = planned()
    assert found.load.rate == pytest.approx(2.0)  # 10 requests of 1000 tokens at 200 a second
    assert (found.load.isl, found.load.isl_cv, found.load.osl, found.load.cv) == (20.0, 0.5, 100.0, 1.0)
    assert any("wait for their answers" in one for one in found.warnings)
    even = planned(offered=OfferedLoad(rate=3.0, burstiness=math.inf))
    assert (even.load.rate, even.load.cv) == (3.0, 0.0)


def test_without_goals_the_sla_is_what_the_run_kept_and_with_them_it_is_theirs():
    found = planned()
    assert found.feasible
    assert found.sla == Sla(ttft=0.1, tpot=0.01, e2el=1.0)
    assert any("no goals were given" in one for one in found.warnings)
    goals = Sla(ttft=0.2, attainment=0.95)
    missed = planned(sla=goals)
    assert (missed.sla, missed.feasible) == (goals, False)
    assert missed.best_achievable == missed.predicted
    assert planned(sla=replace(goals, attainment=0.85)).feasible


@pytest.mark.parametrize("system", [name for name, one in SYSTEMS.items() if one.is_own])
def test_it_can_be_emitted(system):
    files = emit(system, EmitRequest(plan=planned(), model="tiny")).files
    if system == "forerun":
        assert yaml.safe_load(files["serve.yaml"])["speculative-config"] == {"method": "suffix"}


@pytest.mark.parametrize("system", ["vllm", "sglang", "trtllm", "ray"])
def test_other_systems_decode_as_it_says(system):
    assert emit(system, EmitRequest(plan=planned("plain"), model="org/tiny")).files
