"""What `forerun emit` writes, read by the systems themselves, each in an environment of its own.

make test-emitted
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from forerun.models.store import resolve_model
from forerun.plan.emit.systems import SYSTEMS, emit
from tests.plan.emit.plans import APART, EAGLE3, NGRAM, PLAN, SCHEDULE, WINDOW, request, with_engine, write_profile
from tests.slow.environments import interpreter_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HERE = Path(__file__).parent
MODEL = "smollm2-135m"


def read_by(environment, script, *arguments):
    """Run a script of this folder in the environment of a system."""
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [interpreter_of(environment), HERE / script, *arguments],
        env=plain | {"RAY_USAGE_STATS_ENABLED": "0", "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def written(system, folder, plan):
    """The files of a system, with those of the profile where it reads one, in a folder."""
    profile_folder = write_profile(folder / "profile") if SYSTEMS[system].reads_profile else None
    for name, text in emit(system, request(plan, profile_folder=profile_folder)).files.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("config", [None, NGRAM, NGRAM | WINDOW | SCHEDULE])
def test_vllm_configures_the_engine_that_was_planned(config, tmp_path):
    plan = replace(PLAN, model=str(resolve_model(MODEL)), speculative_config=config)
    script = emit("vllm", request(plan)).files["serve.sh"]
    line = next(line for line in script.replace("\\\n", " ").splitlines() if line.startswith("exec vllm serve "))
    words = ["8000" if word == "${PORT:-8000}" else word for word in shlex.split(line)[3:]]
    (tmp_path / "words.json").write_text(json.dumps(words))
    read_by("vllm", "emitted_vllm.py", tmp_path / "words.json", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    engine = plan.engine
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        assert found[name] == getattr(engine, name)
    drafts = config or {"method": None, "num_speculative_tokens": None}
    assert (found["method"], found["num_speculative_tokens"]) == (drafts["method"], drafts["num_speculative_tokens"])
    assert found["schedule"] == drafts.get("num_speculative_tokens_per_batch_size")


@pytest.mark.parametrize(("environment", "name"), [("dynamo", "dynamo-v1alpha1.yaml"), ("dynamo_1_6", "dynamo.yaml")])
@pytest.mark.parametrize("plan", [PLAN, APART])
def test_dynamo_reads_the_graph_the_settings_and_the_latencies(environment, name, plan, tmp_path):
    folder = written("dynamo", tmp_path, plan)
    _, graph = yaml.safe_load_all((folder / "dynamo.yaml").read_text())
    (planner,) = [one for one in graph["spec"]["components"] if one["type"] == "planner"]
    (folder / "planner.json").write_text(json.dumps(planner["podTemplate"]["spec"]["containers"][0]["args"]))
    read_by(environment, "emitted_dynamo.py", folder / name, folder / "mocker.sh", folder)
    found = json.loads((folder / "found.json").read_text())
    assert found["prompt_tokens"] == [100, 500, 1000]
    assert found["step_ms"] == pytest.approx([11.4, 11.4, 18.4, 18.4])
    assert found["mocker_times"].endswith("mocker_k4.npz")
    assert found["mocked"] == ([["agg", 3]] if plan is PLAN else [["prefill", 1], ["decode", 2]])


@pytest.mark.parametrize("environment", ["ray", "ray_2_56"])
def test_ray_serve_reads_its_configuration(environment, tmp_path):
    """The release whose names are written, and that of the image."""
    read_by(environment, "emitted_ray.py", written("ray", tmp_path, PLAN) / "serve.yaml")


@pytest.mark.parametrize("config", [None, NGRAM, EAGLE3, {"method": "mtp", "num_speculative_tokens": 2}])
def test_sglang_reads_its_options(config, tmp_path):
    plan = with_engine(replace(PLAN, speculative_config=config), tensor_parallel_size=2)
    script = emit("sglang", request(plan)).files["serve.sh"]
    line = next(line for line in script.replace("\\\n", " ").splitlines() if "sglang.launch_server" in line)
    words = [
        "30000" if word == "${PORT:-30000}" else word for word in shlex.split(line.split("sglang.launch_server")[1])
    ]
    (tmp_path / "words.json").write_text(json.dumps(words))
    read_by("sglang", "emitted_sglang.py", tmp_path / "words.json", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    engine = plan.engine
    assert found["tp_size"] == 2
    assert (found["max_running_requests"], found["chunked_prefill_size"]) == (
        engine.max_num_seqs,
        engine.max_num_batched_tokens,
    )
    assert (found["context_length"], found["page_size"]) == (engine.max_model_len, engine.block_size)
    length = None if config is None else config["num_speculative_tokens"] + 1
    assert found["speculative_num_draft_tokens"] == length


def test_kubernetes_and_compose_read_their_files(tmp_path):
    written("kubernetes", tmp_path, PLAN)
    (tmp_path / "compose").mkdir()
    written("compose", tmp_path / "compose", PLAN)
    (tmp_path / "dynamo").mkdir()
    written("dynamo", tmp_path / "dynamo", PLAN)
    (tmp_path / "ray").mkdir()
    written("ray", tmp_path / "ray", PLAN)
    custom = (tmp_path / "dynamo" / "dynamo.yaml", tmp_path / "ray" / "rayservice.yaml")
    files = (tmp_path / "forerun.yaml", tmp_path / "compose" / "compose.yaml", *custom)
    read_by("manifests", "emitted_manifests.py", *files)
