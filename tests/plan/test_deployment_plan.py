"""plan.json, written and read."""

import json
import os
import subprocess
import sys
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

ENGINE, LOAD = (PLAN.to_json()[name] for name in ("engine", "load"))


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = PLAN.save(tmp_path / "new" / "folder")
    assert path.name == "plan.json"
    assert DeploymentPlan.load_file(path) == PLAN
    assert DeploymentPlan.load_file(path.parent) == PLAN


def test_a_plan_that_does_not_fit_on_the_disk_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text = Path.write_text

    def full(path: Path, text: str, **options: str) -> int:
        write_text(path, text[:1], **options)
        raise OSError(28, "No space left on device")

    PLAN.save(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space left"):
            replace(PLAN, model="other").save(tmp_path)
    assert DeploymentPlan.load_file(tmp_path) == PLAN
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_plan_is_utf_8_whatever_the_locale_says(tmp_path: Path) -> None:
    """As on Windows, whose usual encoding is another."""
    PLAN.save(tmp_path)
    code = f"""from pathlib import Path
from dataclasses import replace
from forerun.plan.deployment_plan import DeploymentPlan
folder = Path({str(tmp_path)!r})
replace(DeploymentPlan.load_file(folder), model="Mod\\xe8le").save(folder)
"""
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert DeploymentPlan.load_file(tmp_path).model == "Mod\xe8le"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "version 2; must be 1"),
        ({"version": True}, "version True; must be 1"),
        ({"layout": "apart"}, "must be aggregated or disaggregated"),
        ({"replica": 1}, "did you mean 'replicas'"),
        ({"engine": {"max_num_seq": 1}}, "did you mean 'max_num_seqs'"),
        (
            {"engine": {"max_num_seqs": 1}},
            "plan: engine: lacks max_num_batched_tokens, max_model_len, block_size, dtype",
        ),
        ({"load": {"rate": 1}}, "isl, osl missing"),
        ({"load": None}, "got load=None; must be an object"),
        ({"load": LOAD | {"isl": "many"}}, "plan: load: got isl='many'; must be a finite number: plan again"),
        ({"load": LOAD | {"osl": float("nan")}}, "got osl=nan; must be a finite number"),
        ({"load": LOAD | {"rate": 10**400}}, "got rate=1000.*; must be a finite number"),
        ({"sla": []}, r"got sla=\[\]; must be an object"),
        ({"sla": {"ttft_ms": "500"}}, "plan: sla: got ttft_ms='500'; must be a finite number or null"),
        ({"sla": {"ttft_ms": 500, "attainment": None}}, "got attainment=None; must be a finite number: plan again"),
        ({"profile": {"kernels": 5}}, "plan: profile: got kernels=5; must be a text"),
        (
            {"acceptance": {"conditional_accept_rates": 0.5}},
            "got conditional_accept_rates=0.5; must be a list: plan again",
        ),
        (
            {"acceptance": {"conditional_accept_rates": ["x"]}},
            r"got conditional_accept_rates=\['x'\]; must be a list of",
        ),
        ({"engine": None}, "got engine=None; must be an object"),
        ({"engine": ENGINE | {"max_num_seqs": 0}}, "got max_num_seqs=0; must be a whole number, at least 1"),
        ({"engine": ENGINE | {"tensor_parallel_size": "2"}}, "got tensor_parallel_size='2'"),
        (
            {"engine": ENGINE | {"tensor_parallel_size": 10**30}},
            "got tensor_parallel_size=1000.*; must be a whole number, at least 1, at most 1024: plan again",
        ),
        ({"engine": ENGINE | {"max_num_seqs": 10**30}}, "got max_num_seqs=1000.*, at most 1000000: plan again"),
        ({"engine": ENGINE | {"block_size": 10**400}}, "got block_size=1000.*, at most 9007199254740992: plan again"),
        ({"engine": ENGINE | {"dtype": None}}, "got dtype=None; must be a text"),
        ({"engine": ENGINE | {"device": "tpu"}}, "got device='tpu'; must be cpu, cuda or null"),
        ({"engine": ENGINE | {"kernel_settings": []}}, r"got kernel_settings=\[\]; must be an object"),
        ({"replicas": -3}, "got replicas=-3; must be a whole number, at least 1"),
        ({"replicas": "x"}, "got replicas='x'"),
        ({"replicas": True}, "got replicas=True"),
        ({"replicas": 3, "prefill_replicas": 1, "decode_replicas": 2}, "must add up"),
        ({"layout": "disaggregated"}, "got prefill_replicas=0; must be a whole number, at least 1"),
        ({"speculative_config": 7}, "got speculative_config=7; must be an object or null"),
        ({"feasible": "yes"}, "got feasible='yes'; must be true or false"),
        ({"model": None}, "got model=None; must be a text"),
        ({"warnings": "one"}, "got warnings='one'; must be a list"),
        ({"warnings": [1]}, "got a warning=1; must be a text"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(tmp_path: Path, change: dict[str, object], said: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(PLAN.to_json() | change))
    with pytest.raises(ConfigError, match=said) as caught:
        DeploymentPlan.load_file(file)
    assert str(caught.value).startswith(f"{file}: ")


@pytest.mark.parametrize("key", ["model", "profile", "load", "sla", "feasible", "layout", "replicas", "engine"])
def test_a_plan_that_lacks_a_key_names_it(tmp_path: Path, key: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({name: value for name, value in PLAN.to_json().items() if name != key}))
    with pytest.raises(ConfigError, match=f"plan: lacks {key}; plan again"):
        DeploymentPlan.load_file(file)


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "not JSON"), pytest.param("[" * 100_000, "not JSON", id="deep"), ("[]", "must be one JSON object")],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        DeploymentPlan.load_file(file)


def test_a_missing_file_names_the_command_that_writes_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="forerun plan --output"):
        DeploymentPlan.load_file(tmp_path)
