"""plan.json, written and read."""

import json
from pathlib import Path

import pytest

from forerun.errors import ConfigError
from forerun.plan.deployment_plan import DeploymentPlan, Layout, PlannedEngine
from forerun.plan.load import Load
from forerun.plan.sla import Sla

PLAN = DeploymentPlan(
    model="smollm2-135m",
    profile={"machine": "a machine"},
    load=Load(rate=20, isl=3000, osl=300),
    sla=Sla(ttft=0.5, tpot=0.05),
    feasible=True,
    best_achievable=None,
    layout=Layout.AGGREGATED,
    replicas=3,
    prefill_replicas=0,
    decode_replicas=0,
    engine=PlannedEngine(
        max_num_seqs=16, max_num_batched_tokens=2048, max_model_len=4096, block_size=16, dtype="bfloat16"
    ),
    speculative_config={"method": "suffix", "num_speculative_tokens": 5},
    predicted={"ttft_p95_ms": 410.0},
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
