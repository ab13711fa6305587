"""forerun emit: files are written or printed, and what the system lacks is one line."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace

import pytest
import yaml

from forerun.cli.app import main
from forerun.cli.emit import emit
from forerun.errors import ConfigError
from forerun.plan.profile import SERVERS_KERNELS
from tests.plan.emit.plans import PLAN


@pytest.fixture
def plan(tmp_path):
    replace(PLAN, model="smollm2-135m", speculative_config={"method": "auto"}).save(tmp_path)
    return str(tmp_path)


def run(*words):
    emit(list(words), exit_on_error=False, print_error=False, result_action="return_value")


def test_files_are_written_and_scripts_can_be_run(plan, tmp_path, capsys):
    folder = tmp_path / "launch" / "here"
    run("--plan", plan, "--to", "forerun", "--output", str(folder))
    assert os.access(folder / "serve.sh", os.X_OK)
    assert yaml.safe_load((folder / "serve.yaml").read_text())["speculative-config"] == {"method": "auto"}
    written = capsys.readouterr()
    assert written.out.split() == [str(folder / "serve.yaml"), str(folder / "serve.sh")]
    assert "3 servers are planned" in written.err


def test_files_of_others_are_not_overwritten_and_its_own_are(plan, tmp_path):
    """As those of `forerun tune`, whose folder has a serve.yaml beside its plan."""
    (tmp_path / "serve.yaml").write_text("# tuned\nmodel: m\n")
    with pytest.raises(ConfigError, match=r"serve\.yaml is there, and forerun emit has not written it; give another"):
        run("--plan", plan, "--to", "forerun", "--output", str(tmp_path))
    assert (tmp_path / "serve.yaml").read_text() == "# tuned\nmodel: m\n"
    assert not (tmp_path / "serve.sh").exists(), "nothing is written where not all can be"
    words = ("--plan", plan, "--to", "forerun", "--output", str(tmp_path / "launch"))
    run(*words)
    written = {path.name: path.read_text() for path in (tmp_path / "launch").iterdir()}
    run(*words)
    assert {path.name: path.read_text() for path in (tmp_path / "launch").iterdir()} == written
    run(*words, "--no-speculation")
    assert yaml.safe_load((tmp_path / "launch" / "serve.yaml").read_text())["no-speculation"]
    assert written["serve.sh"].startswith("#!/bin/sh\n")


@pytest.mark.parametrize(("system", "program"), [("forerun", "forerun"), ("trtllm", "trtllm-serve")])
def test_scripts_find_their_files_wherever_they_are_started_from(system, program, tmp_path):
    replace(PLAN, model="org/name", speculative_config=None).save(tmp_path)
    folder, programs = tmp_path / "to launch", tmp_path / "bin"
    run("--plan", str(tmp_path), "--to", system, "--output", str(folder))
    programs.mkdir()
    fake = programs / program
    fake.write_text('#!/bin/sh\nwhile [ "$1" != --config ]; do shift; done\ncat "$2"\n')
    fake.chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    command = ["sh", str(folder / "serve.sh")]
    shown = subprocess.run(command, cwd=tmp_path, env={"PATH": path}, capture_output=True, text=True, check=True).stdout
    assert shown == next(folder.glob("*.yaml")).read_text()


def test_other_speculation_may_be_given_for_a_system_that_lacks_the_plans(plan, capsys):
    words = ["--plan", plan, "--to", "vllm", "--model", "org/name"]
    with pytest.raises(ConfigError, match="vLLM has no method 'auto'"):
        run(*words)
    run(*words, "--speculative-config.method", "ngram", "--speculative-config.num_speculative_tokens", "4")
    assert json.dumps({"method": "ngram", "num_speculative_tokens": 4}) in capsys.readouterr().out
    run(*words, "--no-speculation")
    assert "speculative" not in capsys.readouterr().out
    with pytest.raises(ConfigError, match="contradicts"):
        run(*words, "--no-speculation", "--speculative-config.method", "ngram")


@pytest.mark.parametrize("system", ["forerun", "compose", "kubernetes"])
def test_speculation_with_which_our_servers_would_not_start_is_refused(plan, system):
    for config in ('{"method": "suffics"}', '{"method": "suffix", "no_such_key": 1}'):
        with pytest.raises(ConfigError, match=r"suffics|no_such_key"):
            run("--plan", plan, "--to", system, "--speculative-config", config)


def test_speculation_of_a_profiled_server_that_ours_has_not_is_refused(tmp_path, capsys):
    served, dspark = PLAN.profile | {"kernels": SERVERS_KERNELS}, {"method": "dspark", "num_speculative_tokens": 4}
    replace(PLAN, profile=served, speculative_config=dspark | {"model": "org/head"}).save(tmp_path)
    with pytest.raises(ConfigError, match="dspark"):
        run("--plan", str(tmp_path), "--to", "forerun")
    run("--plan", str(tmp_path), "--to", "vllm")
    assert "dspark" in capsys.readouterr().out


def test_a_plan_that_misses_its_sla_is_emitted_with_a_note(tmp_path, capsys):
    replace(PLAN, feasible=False, best_achievable={}).save(tmp_path)
    run("--plan", str(tmp_path), "--to", "compose")
    written = capsys.readouterr()
    assert "does not meet its SLA" in written.err
    assert "services" in written.out


@pytest.mark.parametrize("system", ["forerun", "vllm", "sglang", "trtllm"])
def test_an_image_is_refused_where_no_file_names_one(system, tmp_path):
    replace(PLAN, model="org/name").save(tmp_path)
    with pytest.raises(
        ConfigError, match=r"files for \w+ name no container image; those for compose, kubernetes, dynamo"
    ):
        run("--plan", str(tmp_path), "--to", system, "--image", "registry/own:1")


@pytest.mark.parametrize("system", ["vllm", "sglang", "trtllm", "ray"])
def test_a_profile_is_refused_where_no_file_reads_it(system, tmp_path):
    replace(PLAN, model="org/name").save(tmp_path)
    with pytest.raises(ConfigError, match=r"--profile: .* those for forerun, compose, kubernetes, dynamo read it"):
        run("--plan", str(tmp_path), "--to", system, "--profile", str(tmp_path))


@pytest.mark.parametrize("system", ["compose", "kubernetes", "ray"])
def test_an_image_is_named_where_a_file_has_one(system, tmp_path, capsys):
    replace(PLAN, model="org/name").save(tmp_path)
    run("--plan", str(tmp_path), "--to", system, "--image", "registry/own:1")
    assert "registry/own:1" in capsys.readouterr().out


def test_a_damaged_plan_is_one_line_that_names_file_and_field(tmp_path, capsys):
    path = PLAN.save(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sla": {"ttft_ms": "soon"}}))
    assert main(["emit", "--plan", str(tmp_path), "--to", "compose"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{path}: plan: sla: got ttft_ms='soon'; must be a finite number or null: plan again" in line


@pytest.mark.parametrize(
    "schedule",
    [None, "x", [], [[1, 2]], [[1, 4, "x"]], [[2, 4, 3]], [[1, 4, 3], [4, 8, 2]], [[5, 8, 2], [1, 4, 3]], [[1, 4, -1]]],
)
def test_a_damaged_schedule_of_draft_lengths_is_one_line(schedule, tmp_path):
    name = "num_speculative_tokens_per_batch_size"
    config = {"method": "ngram", "num_speculative_tokens": 4, name: schedule}
    replace(PLAN, model="org/name", speculative_config=config).save(tmp_path)
    with pytest.raises(ConfigError, match=f"speculative_config: got {name}.*; .*must .*give another with"):
        run("--plan", str(tmp_path), "--to", "vllm")
