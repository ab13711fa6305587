"""`forerun tune`: a whole tuning of a tiny chat model, its files, going on, and its refusals."""

from __future__ import annotations

import functools
import gc
import json
import shutil
from dataclasses import replace

import pytest
import torch
import yaml

import forerun
from forerun import LLM
from forerun.bench import instruments
from forerun.bench.machine import describe_kernels, describe_machine
from forerun.bench.tuning import step_times, tuner
from forerun.cli import tune as command
from forerun.cli.app import main
from forerun.core.held_folder import held_folder
from forerun.errors import ConfigError
from forerun.plan.deployment_plan import DeploymentPlan
from forerun.plan.profile import Profile
from forerun.plan.step_times import StepSample, StepTimeModel
from forerun.plan.tuning.offered_load import OfferedLoad
from tests.stand_in import save_stand_in

CONFIGS = """
ngram: {method: ngram, num_speculative_tokens: 3, prompt_lookup_min: 1}
suffix: {method: suffix, num_speculative_tokens: 4}
auto: {method: auto}
"""
SHORT = {"--max-tokens": "12", "--rounds": "2"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_stand_in(tmp_path_factory.mktemp("chat-model")))


@pytest.fixture
def begin(tune, monkeypatch):
    """Begin a tuning, which is interrupted at once."""

    def begin(*options):
        def interrupted(_):
            raise ConfigError("a power cut")

        with monkeypatch.context() as patched:
            patched.setattr(tuner.Tuner, "tune", interrupted)
            tune(*options, code=2)

    return begin


@pytest.fixture
def tune(model, tmp_path, capsys, monkeypatch):
    """Tune the tiny model into tmp_path / "tuned"; what is printed."""
    monkeypatch.setattr(step_times, "NUM_STEPS", 1)
    monkeypatch.setattr(step_times, "DRAFT_LENGTHS", (0, 4))
    monkeypatch.setitem(instruments.BUFFER_BYTES, "cpu", 1 << 16)
    (tmp_path / "chat.txt").write_text("to be or not to be\na b a b a b\n")
    (tmp_path / "configs.yaml").write_text(CONFIGS)

    def tune(*options, code=0):
        files = ("--prompts", str(tmp_path / "chat.txt"), "--configs", str(tmp_path / "configs.yaml"))
        short = [word for name, value in SHORT.items() if name not in options for word in (name, value)]
        assert main(["tune", model, *files, "--output", str(tmp_path / "tuned"), *short, *options]) == code
        return capsys.readouterr()

    return tune


def test_tune_writes_a_configuration_its_reasons_and_a_picture(tune, tmp_path):
    shown = tune().out
    tuned = tmp_path / "tuned"
    report = json.loads((tuned / "tuning.json").read_text())
    options = yaml.safe_load((tuned / "serve.yaml").read_text())
    best = report["best"]
    assert best["name"] in ("plain", "ngram", "suffix", "auto")
    assert options.get("speculative-config") == best["speculative_config"]
    assert options["max-num-seqs"] == 64
    assert {"auto", "plain"} <= report["runs"].keys()
    assert [one["name"] for one in report["screened"]].count(best["name"]) == 1
    assert report["num_differing"] == dict.fromkeys(report["runs"], 0)
    assert set(report["pareto_front"]) <= report["runs"].keys()
    for line in report["reasons"]:
        assert line in (tuned / "serve.yaml").read_text()
    plan = DeploymentPlan.load_file(tuned)
    assert plan.speculative_config == best["speculative_config"]
    assert (plan.engine.max_num_seqs, plan.engine.dtype, plan.engine.device) == (64, "float32", "cpu")
    assert f"forerun serve --config {tuned / 'serve.yaml'}" in shown.replace("\n", "")
    pytest.importorskip("matplotlib")
    assert "<svg" in (tuned / "pareto.svg").read_text()


def test_the_estimate_comes_first_and_a_dry_run_stops_there(tune, tmp_path):
    shown = tune("--dry-run", "--json")
    assert shown.err.startswith("at most about ")
    estimate = json.loads(shown.out)
    assert estimate["total"] == pytest.approx(sum(v for name, v in estimate.items() if name != "total"))
    assert not (tmp_path / "tuned").exists(), "another tuning may have it"


def test_an_interrupted_tuning_goes_on(tune, tmp_path, monkeypatch):
    run = tuner.Tuner._run
    asked = []

    def interrupted(self, candidate, number):
        asked.append((candidate.name, number))
        if number == 1:
            raise ConfigError("a power cut")
        return run(self, candidate, number)

    monkeypatch.setattr(tuner.Tuner, "_run", interrupted)
    monkeypatch.setattr("forerun.plan.tuning.confirmation.FAR_BEHIND", 1.0)
    tune(code=2)
    kept = json.loads((tmp_path / "tuned" / "rounds.json").read_text())
    assert len(kept) == 1

    def again(self, candidate, number):
        assert number == 1, "the first round is kept"
        return run(self, candidate, number)

    monkeypatch.setattr(tuner.Tuner, "_run", again)
    monkeypatch.setattr(tuner, "record", None)
    monkeypatch.setattr(tuner, "measure_step_times", None)
    monkeypatch.setattr(tuner, "screen", None)
    report = json.loads(tune("--json").out)
    assert report["runs"]["auto"][0] == kept[0]["auto"]


def test_a_recording_of_fewer_texts_than_prompts_is_named(tune, monkeypatch):
    write = tuner.write_recording
    monkeypatch.setattr(
        tuner, "write_recording", lambda found, path: write(replace(found, texts=found.texts[:1]), path)
    )
    for _ in range(2):
        assert "recording.jsonl.gz: has 1 texts for 2 prompts; delete it, and it is made anew" in tune(code=2).err


def test_k_by_batch_size_is_simulated_too_and_kept(tune, monkeypatch):
    schedule = {"num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 2, 1]]}

    def by_batch_size(candidates, figures, _, *, max_batch_size, context):
        assert set(figures) == {"ngram", "suffix", "auto"}
        assert (max_batch_size, context > 12) == (2, True)
        ngram = next(one for one in candidates if one.name == "ngram")
        return replace(ngram, name="by size", speculative_config={**ngram.speculative_config, **schedule})

    monkeypatch.setattr(tuner, "with_schedule", by_batch_size)
    report = json.loads(tune("--load", "concurrency=2", "--json").out)
    (found,) = [one for one in report["screened"] if one["name"] == "by size"]
    assert schedule.items() <= found["speculative_config"].items()
    monkeypatch.setattr(tuner, "screen", None)
    again = json.loads(tune("--load", "concurrency=2", "--json").out)
    assert again["screened"] == report["screened"]


def test_sampled_texts_are_verified_in_other_lossless_ways_too(tune):
    report = json.loads(tune("--temperature", "1", "--json").out)
    tried = {one["speculative_config"]["rejection_sample_method"] for one in report["screened"] if ", " in one["name"]}
    assert tried == {"standard", "block"}
    assert {name for name in report["probed"] if ", " in name} == {
        one["name"] for one in report["screened"] if ", " in one["name"]
    }


def test_a_rate_with_goals_is_tuned_for_goodput(tune):
    few = ("--max-num-seqs", "4")
    report = json.loads(tune("--load", "rate=50", "--goodput", "ttft:5000", "e2el:9000", *few, "--json").out)
    assert report["objective"] == "goodput"
    assert report["runs"][report["best"]["name"]][0]["attainment"] == 1.0
    assert {one["max_num_seqs"] for one in report["screened"]} == {4, 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--load", "rate=2,isl=30"], "the prompts have their own lengths"),
        (["--goodput", "itl:5"], "--goodput: got 'itl:5'"),
        (["--objective", "goodput"], "--objective: got goodput without goals"),
        (["--rounds", "0"], "--rounds: got 0"),
        (["--finalists", "0"], "--finalists: got 0"),
        (["--max-tokens", "0"], "--max-tokens: got 0"),
        (["--max-tokens", "2000"], "and its answer 2000; max_model_len is 1024"),
        (["--max-model-len", "16"], "and its answer 12; max_model_len is 16"),
        (["--try-quantization", "int5"], "quantization: got 'int5'"),
        (["--try-max-num-seqs", "0"], "got 0 sequences"),
        (["--try-max-num-seqs", "4096"], "got 4096 sequences with 2048 tokens"),
        (["--speculative-config.method", "suffix"], "tune finds it"),
        (["--no-speculation"], "--no-speculation: tune tries plain decoding anyway"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(tune, tmp_path, options, message):
    assert message in tune(*options, code=2).err
    assert not (tmp_path / "tuned" / "recording.jsonl.gz").exists()


def test_a_format_of_weights_that_there_is_not_is_refused_before_any_time_is_estimated(tune):
    assert tune("--try-quantization", "int5", code=2).err.startswith("error: quantization: got 'int5'")


def test_a_drafter_that_cannot_be_made_is_named_before_anything_is_measured(tune, tmp_path):
    (tmp_path / "configs.yaml").write_text(
        CONFIGS + "gone: {method: draft_model, model: no/such, num_speculative_tokens: 2}"
    )
    assert "gone: " in tune(code=2).err
    assert not (tmp_path / "tuned" / "recording.jsonl.gz").exists()


def test_more_sequences_than_a_quarter_of_the_tokens_may_be_tried():
    search = command.SearchOptions(try_max_num_seqs=[1024])
    found = command._limits(OfferedLoad(rate=2.0), search, command.EngineOptions())
    assert [(one.max_num_seqs, one.max_num_batched_tokens) for one in found] == [(64, 2048), (64, 512), (1024, 2048)]


def test_a_folder_of_another_tuning_is_refused(tune, begin):
    begin()
    assert "is of a tuning with load" in tune("--dry-run", "--load", "concurrency=2", code=2).err


def test_a_folder_of_a_drafter_that_was_trained_further_is_refused(tune, begin, tmp_path):
    head = tmp_path / "head"
    shutil.copytree(save_stand_in(tmp_path / "made"), head)
    (tmp_path / "configs.yaml").write_text(
        f"{CONFIGS}ours: {{method: draft_model, model: {head}, num_speculative_tokens: 2}}"
    )
    begin()
    (weights,) = head.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert "is of a tuning with drafters.ours." in tune("--dry-run", code=2).err


def test_a_tuning_that_goes_on_in_another_process_is_left_alone(tune, begin, tmp_path):
    begin()
    with held_folder(tmp_path / "tuned", "--output", "works"):
        assert "another process goes on with the tuning in" in tune(code=2).err
        tune("--dry-run")
    assert not (tmp_path / "tuned" / "recording.jsonl.gz").exists()


def test_a_folder_of_something_else_is_refused(tune, tmp_path):
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "thesis.txt").write_text("all of it")
    assert "is no folder of a tuning" in tune(code=2).err


def test_options_at_their_defaults_are_left_out_of_the_file():
    changed = command._changed(command.EngineOptions(dtype="bfloat16", max_num_seqs=3))
    assert changed == {"dtype": "bfloat16"}


def test_a_profile_stands_in_for_measured_steps(tune, tmp_path, model, monkeypatch):
    profile(model, kernels=kernels(model)).save(tmp_path / "profile")
    monkeypatch.setattr(tuner, "measure_step_times", None)
    tune("--profile", str(tmp_path / "profile"))
    assert (tmp_path / "tuned" / "steps.json").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "another"}, "it is of another model"),
        ({"machine": "elsewhere"}, "it is of another machine"),
        ({"version": "0.0.1"}, "it is of another version"),
        ({"kernels": "native of another kind"}, "it is of another kernels"),
        ({"dtype": "bfloat16"}, "it is of another dtype"),
        ({"tensor_parallel_size": 2}, "it is of another tensor_parallel_size"),
        ({"kernel_settings": {"activation_dtype": "int8"}}, "it is of another kernel_settings"),
        ({"quantization": "int8"}, "it is of weights in the format int8, and tuned are None"),
    ],
)
def test_a_profile_of_something_else_is_refused_and_leaves_no_folder(tune, tmp_path, model, changes, said):
    replace(profile(model, kernels=kernels(model)), **changes).save(tmp_path / "profile")
    assert said in tune("--profile", str(tmp_path / "profile"), code=2).err
    assert not (tmp_path / "tuned").exists()


def test_a_folder_without_a_profile_is_refused(tune, tmp_path):
    assert "has no profile.json" in tune("--profile", str(tmp_path), code=2).err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--max-model-len", "64"), "engine.max_model_len 'None' instead of '64';"),
        (("--kv-cache-memory-bytes", "9000000"), "engine.kv_cache_memory_bytes 'None' instead of '9000000';"),
        (("--block-size", "8"), "engine.block_size '16' instead of '8';"),
    ],
)
def test_a_folder_goes_on_only_with_the_same_engine(tune, begin, options, said):
    begin()
    assert f"is of a tuning with {said}" in tune("--dry-run", *options, code=2).err


def test_a_tuning_leaves_a_servers_pools_as_they_are(tune, tmp_path):
    pools = tmp_path / "pools"
    tune("--pools-folder", str(pools))
    gc.collect()  # engines save when they are gone
    assert not pools.exists()
    assert yaml.safe_load((tmp_path / "tuned" / "serve.yaml").read_text())["pools-folder"] == str(pools)


def test_a_folder_goes_on_only_with_the_same_weights_machine_kernels_and_profile(tune, begin, tmp_path, model):
    profile(model, kernels=kernels(model)).save(tmp_path / "profile")
    begin("--profile", str(tmp_path / "profile"))
    assert "is of a tuning with profile" in tune("--dry-run", code=2).err
    settings = tmp_path / "tuned" / "settings.json"
    begun = json.loads(settings.read_text())
    for name in ("fingerprint", "machine", "kernels"):
        settings.write_text(json.dumps(begun | {name: "another"}))
        refused = tune("--dry-run", "--profile", str(tmp_path / "profile"), code=2).err
        assert f"{name} 'another' instead of" in refused


@functools.cache
def kernels(model):
    return describe_kernels(LLM(model, max_model_len=64, speculative_config=None))


def profile(model, machine=None, kernels="torch"):
    machine = machine or describe_machine(torch.device("cpu")).partition("; ")[0]
    steps = [StepSample(num_rows=n, num_sequences=1, num_context_tokens=9, seconds=0.01 + n / 1e3) for n in (1, 4, 9)]
    steps.append(StepSample(num_rows=0, num_sequences=0, num_context_tokens=0, num_prompt_rows=32, seconds=0.05))
    return Profile(
        model=model,
        machine=machine,
        kernels=kernels,
        dtype="float32",
        version=forerun.__version__,
        gigabytes_per_second=10.0,
        weight_bytes=None,
        kv_bytes_per_token=None,
        vocab_size=99,
        num_blocks=9,
        block_size=16,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=64,
        step_times=StepTimeModel.fit(steps),
    )
