"""The whole experiment on a tiny model: results, fallbacks, exit codes. Engines run in processes of their own."""

from __future__ import annotations

import io
import json
import sys

import pytest
from rich.console import Console

from benchmarks.experiment import __main__ as command
from benchmarks.experiment import plan
from benchmarks.experiment.console import ExperimentConsole
from benchmarks.experiment.experiment import effective
from benchmarks.experiment.placement import Placement
from benchmarks.experiment.results import Measured
from benchmarks.experiment.settings import Settings, read_settings, variable
from benchmarks.experiment.start import Launch, Run, Started, start
from benchmarks.experiment.summary import compare, comparison_table
from benchmarks.peers.install import InstallError
from benchmarks.peers.worker_process import WorkerProcess
from tests.stand_in import save_stand_in
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers read /proc")

SMALL = {"NUM_PROMPTS": "3", "BATCH_SIZE": "2", "GENERATION_LENGTH": "6", "MAX_MODEL_LEN": "900"}
LONG_PROMPTS = {"MAX_BATCH_LENGTH": "800"}  # the tiny tokenizer cuts text into bytes


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_stand_in(tmp_path_factory.mktemp("model")))


@pytest.fixture
def run(tmp_path, model, monkeypatch, capsys):
    """Run the command; its exit code and what it printed."""

    def run(*arguments, **variables):
        for name in Settings.__dataclass_fields__:
            monkeypatch.delenv(name.upper(), raising=False)
        settings = {
            "TARGET_MODEL": model,
            "OUTPUT_FILE": str(tmp_path / "r.json"),
            **SMALL,
            **LONG_PROMPTS,
            **variables,
        }
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["run_benchmark.sh", *arguments])
        code = 0
        try:
            command.main()
        except SystemExit as end:
            code = end.code
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


def read(tmp_path, key):
    return json.loads((tmp_path / f"r_{key}.json").read_text())


def test_forerun_plain_and_speculative(run, tmp_path, model):
    code, printed = run("--strict", DRAFTER_MODEL=model, ENABLE_TARGET="true", ENABLE_DEBUG="true")
    assert code == 0
    assert "Inference Engine: forerun" in printed
    assert "📝 Prompt:" in printed
    results = {key: read(tmp_path, key)[key] for key in ("speculative_forerun", "target_ar_forerun")}
    for key, result in results.items():
        assert f"{result['method']}_forerun" == key
        assert result["effective_method"] == result["method"]
        assert [batch["batch_size"] for batch in result["batches"]] == [2, 1]
        requests = [request for batch in result["batches"] for request in batch["requests"]]
        assert all(0 < request["ttft"] <= request["total_latency"] for request in requests)
        assert result["total_tokens"] == sum(request["generated_tokens"] for request in requests) <= 18
        assert result["memory"]["peak_rss_bytes"] > 1 << 20
        assert result["energy"]["method"] != "unavailable" or result["energy"]["reason"]
    assert results["speculative_forerun"]["avg_acceptance_rate"] > 0
    assert results["target_ar_forerun"]["avg_acceptance_rate"] is None
    both = [[batch["requests"] for batch in result["batches"]] for result in results.values()]
    lengths = [[(r["prompt_tokens"], r["generated_tokens"]) for batch in one for r in batch] for one in both]
    assert lengths[0] == lengths[1], "both answered the same prompts with the same greedy text"


@pytest.mark.slow
def test_transformers_speculates_with_a_draft_model(run, tmp_path, model):
    code, _ = run("--strict", INFERENCE_ENGINE="transformers", DRAFTER_MODEL=model, DTYPE="float32", GAMMA_VALUE="3")
    assert code == 0
    result = read(tmp_path, "speculative")["speculative"]
    assert result["avg_acceptance_rate"] == 1.0, "the model agrees with itself"
    assert 0 < result["avg_ttft"] < result["avg_latency"]


@pytest.mark.slow
def test_a_draft_model_that_does_not_fit_is_a_fallback_that_strict_refuses(run, tmp_path):
    save_tiny_model(tmp_path / "other", "LlamaForCausalLM", seed=1, vocab_size=97)
    drafter = str(tmp_path / "other")
    code, printed = run("--strict", INFERENCE_ENGINE="transformers", DRAFTER_MODEL=drafter, NUM_PROMPTS="1")
    assert code == 1
    assert "Falling back to target-only generation" in printed
    whole = read(tmp_path, "speculative")
    assert (whole["speculative"]["method"], whole["speculative"]["effective_method"]) == ("speculative", "target_ar")
    assert "different tokenizers" in whole["speculative"]["fallback_reason"]
    assert whole["warnings"]


def test_a_drafter_that_is_not_there_falls_back_and_passes_without_strict(run, tmp_path):
    code, printed = run(DRAFTER_MODEL="/nonexistent", NUM_PROMPTS="1")
    assert code == 0
    assert "⚠️  Not speculative: this is target_ar" in printed
    whole = read(tmp_path, "speculative_forerun")
    assert whole["speculative_forerun"]["effective_method"] == "target_ar"
    assert whole["schema_version"] == 1
    assert set(whole["environment"]["variables"]) == {variable(f) for f in Settings.__dataclass_fields__.values()}
    assert whole["gpu_monitoring"] == read(tmp_path, "speculative_forerun_gpu")


@pytest.mark.parametrize(
    ("engine", "variables", "reason"),
    [
        ("forerun", {"ENABLE_SPECULATIVE": "false"}, "INFERENCE_METHOD=speculative but ENABLE_SPECULATIVE=false"),
        ("vllm", {}, "INFERENCE_METHOD=speculative but VLLM_ENABLE_SPECULATIVE=false"),
    ],
)
def test_switches_that_rule_speculation_out_are_named(engine, variables, reason, tmp_path, monkeypatch):
    launch = Launch(
        run=Run(engine, "speculative"),
        settings=read_settings(variables),
        placement=Placement((), (), is_auto=True),
        model=tmp_path,
        caller={},
        log=tmp_path / "log",
    )
    started, reasons = [], []
    monkeypatch.setattr("benchmarks.experiment.start._start", lambda *arguments: started.append(arguments[2:]))
    start(launch, [[1]], fall_back=reasons.append)
    assert started == [(None, reason)]
    assert reasons == [reason]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"INFERENCE_ENGINE": "tgi"}, "INFERENCE_ENGINE: got 'tgi'"),
        ({"TARGET_MODEL": "/nonexistent"}, "there is no such folder"),
        ({"OUTPUT_FILE": "/nonexistent/r.json"}, "OUTPUT_FILE: got '/nonexistent/r.json'"),
        ({"INFERENCE_METHOD": "target_ar", "DTYPE": "float7"}, "worker answered ConfigError: dtype: got 'float7'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(run, variables, message):
    code, printed = run(**variables)
    assert code == 2
    (line,) = [line for line in printed.splitlines() if line.startswith("❌")]
    assert message in line


def test_an_engine_that_is_not_installed_is_an_error_alone_and_left_out_of_comparisons(run, tmp_path, monkeypatch):
    def missing(engine):
        if engine == "vllm":
            raise InstallError("vllm: not installed")

    monkeypatch.setattr(plan, "find_python", missing)
    monkeypatch.setattr("benchmarks.experiment.experiment.find_python", missing)
    assert run(INFERENCE_ENGINE="vllm")[0] == 2
    console = ExperimentConsole(Console())
    runs = [(one.engine, one.method) for one in plan.plan_comparison(console)]
    assert runs == [
        ("transformers", "speculative"),
        ("forerun", "target_ar"),
        ("forerun", "speculative"),
        ("transformers", "target_ar"),
    ]
    assert console.warnings == ["left out: vllm: not installed"]


def test_a_comparison_asks_for_speculation_by_itself():
    settings = plan.with_all_speculation(read_settings({"ENABLE_SPECULATIVE": "false"}))
    assert settings.enable_speculative
    assert settings.vllm_enable_speculative


def test_drafts_that_all_failed_are_plain_decoding(tmp_path):
    worker = WorkerProcess([sys.executable, "-c", ""], environment={}, log=tmp_path / "log")
    worker.close()
    started = Started(
        worker=worker,
        effective_method="speculative",
        fallback_reason=None,
        speculation={"method": "ngram"},
        version="",
        load_seconds=0.0,
        cpu_seconds=0.0,
    )
    assert effective(started, Measured()) == ("speculative", None)
    method, reason = effective(started, Measured(num_failed_drafts=7))
    assert method == "target_ar"
    assert reason is not None
    assert "all 7 drafts failed" in reason


def result(engine, method, speed, joules=None):
    return {
        "engine": engine,
        "method": method,
        "effective_method": method,
        "busy_throughput": speed,
        "avg_latency": 100 / speed,
        "avg_ttft": 0.1,
        "memory": {"peak_rss_bytes": 1000, "peak_gpu_bytes": None},
        "energy": {"j_per_output_token": joules},
    }


def test_ratios_are_to_transformers_speculation_and_to_the_engine_s_own_plain_decoding():
    rows = compare(
        [
            result("forerun", "target_ar", 20.0),
            result("forerun", "speculative", 60.0, 2.0),
            result("transformers", "speculative", 10.0, 4.0),
        ]
    )
    assert [row["throughput_ratio"] for row in rows] == [2.0, 6.0, 1.0]
    assert [row["throughput_ratio_to_own_target_ar"] for row in rows] == [1.0, 3.0, None]
    assert [row["energy_ratio"] for row in rows] == [None, 0.5, 1.0]
    assert rows[1]["latency_ratio"] == pytest.approx(1 / 6)


def test_a_comparison_of_every_engine_fits_a_terminal():
    results = [
        result(engine, method, 1234.56, 0.123)
        for engine in ("transformers", "forerun", "vllm")
        for method in ("speculative", "target_ar")
    ]
    console = Console(width=80, file=io.StringIO())
    console.print(comparison_table(results, compare(results)))
    printed = console.file.getvalue()
    assert "…" not in printed
    assert printed.count("1234.6") == 6


def test_keys_are_the_original_s_for_transformers():
    assert Run("transformers", "speculative").key == "speculative"
    assert Run("vllm", "target_ar").key == "target_ar_vllm"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_vllm_plain_and_speculative_on_the_default_model(run, tmp_path):
    try:
        plan.find_python("vllm")
    except InstallError as error:
        pytest.skip(str(error))
    more = {"TARGET_MODEL": "smollm2-135m", "VLLM_MAX_NUM_SEQS": "8", "VLLM_ENABLE_SPECULATIVE": "true"}
    code, _ = run("--strict", INFERENCE_ENGINE="vllm", ENABLE_TARGET="true", **more)
    assert code == 0
    assert read(tmp_path, "speculative_vllm")["speculative_vllm"]["drafts_generated"] > 0
    assert read(tmp_path, "target_ar_vllm")["target_ar_vllm"]["avg_ttft"] > 0
