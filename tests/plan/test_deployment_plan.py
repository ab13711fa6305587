"""plan.json, written and read."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.errors import ConfigError
from forerun.plan.deployment_plan import DeploymentPlan
from tests.plan.deployment_plans import PLAIN_PLAN

PLAN = replace(
    PLAIN_PLAN,
    speculative_config={"method": "suffix", "num_speculative_tokens": 5},
    predicted={"ttft_p95_ms": 410.0},
    corrections={"time_factor": 1.1, "acceptance_factor": 1.0, "learnt_from": ["test.json"]},
    warnings=("one",),
)


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = PLAN.save(tmp_path / "new" / "folder")
    assert path.name == "plan.json"
    assert DeploymentPlan.load_file(path) == PLAN
    assert DeploymentPlan.load_file(path.parent) == PLAN


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "version 2; must be 1"),
        ({"layout": "apart"}, "must be aggregated or disaggregated"),
        ({"replica": 1}, "did you mean 'replicas'"),
        ({"engine": {"max_num_seq": 1}}, "did you mean 'max_num_seqs'"),
        ({"engine": {"max_num_seqs": 1}}, "missing"),
        ({"load": {"rate": 1}}, "isl, osl missing"),
        ({"load": {"rate": "x", "isl": 1, "osl": 1}}, "of another type"),
        ({"engine": None}, "engine=None; must be an object"),
        ({"engine": PLAN.to_json()["engine"] | {"max_num_seqs": 0}}, "max_num_seqs=0; must be a whole number"),
        ({"engine": PLAN.to_json()["engine"] | {"max_num_seqs": "8"}}, "max_num_seqs='8'; must be a whole number"),
        ({"engine": PLAN.to_json()["engine"] | {"dtype": None}}, "dtype=None; must be a name"),
        ({"load": None}, "load=None; must be an object"),
        ({"sla": 7}, "sla=7; must be an object"),
        ({"replicas": -3}, "replicas=-3, .*aggregated must have replicas of at least 1"),
        ({"replicas": "x"}, "replicas='x'"),
        ({"replicas": 0}, "replicas=0"),
        ({"prefill_replicas": 1}, "no prefill_replicas"),
        ({"layout": "disaggregated"}, "as many replicas as both"),
        ({"layout": "disaggregated", "prefill_replicas": 2, "decode_replicas": 2}, "as many replicas as both"),
        ({"speculative_config": 7}, "speculative_config=7; must be an object or null"),
        ({"predicted": None}, "predicted=None; must be an object"),
        ({"model": 3}, "model=3; must be a name"),
        ({"feasible": "yes"}, "feasible='yes'; must be true or false"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(tmp_path: Path, change: dict[str, object], said: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(PLAN.to_json() | change))
    with pytest.raises(ConfigError, match=said):
        DeploymentPlan.load_file(file)


@pytest.mark.parametrize(("text", "said"), [("{", "not JSON"), ("[]", "must be one JSON object")])
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        DeploymentPlan.load_file(file)


def test_a_missing_file_names_the_command_that_writes_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="forerun plan --output"):
        DeploymentPlan.load_file(tmp_path)
