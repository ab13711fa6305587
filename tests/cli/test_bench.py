"""`forerun bench`: output, files and refusals."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from forerun import LLM
from forerun.bench import instruments
from forerun.bench.curve import NUM_WARMUP_ROUNDS
from forerun.bench.instruments import BandwidthProbe
from forerun.cli import loading
from forerun.cli.app import main
from forerun.errors import ModelError
from forerun.ops.native.library import KERNELS_VARIABLE
from tests.bench.interruptions import interrupt
from tests.cli.fakes import FakeLoader
from tests.tiny_models import tiny_config
from tests.tiny_tokenizer import save_tiny_tokenizer

NGRAM = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}')
CURVE = ("curve", "--rows", "2", "--contexts", "16", "--sequences", "3", "--repeats", "2")
LATENCY = ("latency", "--output-len", "4", "--num-iters-warmup", "1", "--num-iters", "2")
THROUGHPUT = ("throughput", "--num-prompts", "2", "--input-len", "8", "--output-len", "4")
CIRCUMSTANCES = ["model", "dtype", "device", "kernels", "machine", "speculative", "speculation", "interrupted"]


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch):
    monkeypatch.setitem(instruments.BUFFER_BYTES, "cpu", 1 << 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("config-only")
    tiny_config("LlamaForCausalLM", vocab_size=264).save_pretrained(path)
    return path


@pytest.fixture
def run(folder, capsys):
    """Run a benchmark of the tiny model; what it prints."""

    def run(command, *options, model=folder):
        settings = ("--load-format", "dummy", "--max-model-len", "256")
        assert main(["bench", command, str(model), *settings, *options]) == 0
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("measured", [LATENCY, THROUGHPUT])
def test_what_is_measured_takes_no_users_place_in_the_pools(run, tmp_path, measured):
    run(*measured, "--pools-folder", str(tmp_path), "--speculative-config.method", "recycle")
    assert not list(tmp_path.iterdir())


def test_curve_shows_a_row_per_shape(run):
    shown = run(*CURVE)
    rows = [[cell.strip() for cell in line.split("│")[1:4]] for line in shown.splitlines() if line.startswith("│")]
    assert rows == [["16", "1", "1"], ["16", "1", "2"], ["16", "3", "1"]]


def test_curve_says_what_it_was_measured_with(run, folder, monkeypatch):
    monkeypatch.setenv(KERNELS_VARIABLE, "off")
    shown = run(*CURVE).replace("\n", "")
    assert f"{folder}, float32 on cpu, kernels: torch" in shown
    assert "GB/s" in shown


def test_curve_shows_the_drafters_cost_where_there_is_one(run):
    assert "ms per drafted token" not in run(*CURVE)
    assert "ms per drafted token" in run(*CURVE, *NGRAM)


def test_curve_json_is_one_line_with_points_and_drafting(run):
    (line,) = run(*CURVE, "--json", *NGRAM).splitlines()
    report = json.loads(line)
    assert [(point["num_sequences"], point["rows"]) for point in report["points"]] == [(1, 1), (1, 2), (3, 1)]
    assert report["drafting"]["speculative"] == "ngram, K=3"


def test_latency_shows_vllms_words(run):
    shown = run(*LATENCY, "--input-len", "8", "--batch-size", "2")
    assert shown.startswith("Avg latency: ")
    assert "99% percentile latency: " in shown


def test_latency_json_has_vllms_keys_and_the_circumstances(run):
    report = json.loads(run(*LATENCY, "--json"))
    assert list(report) == ["avg_latency", "std_latency", "latencies", "percentiles", *CIRCUMSTANCES]


def test_throughput_shows_vllms_words(run):
    shown = run(*THROUGHPUT)
    assert shown.startswith("Throughput: ")
    assert "Total num output tokens:  8" in shown


def test_throughput_json_has_vllms_keys_and_the_circumstances(run):
    report = json.loads(run(*THROUGHPUT, "--json"))
    vllm = ["elapsed_time", "num_requests", "total_num_tokens", "requests_per_second", "tokens_per_second"]
    ours = ["num_prompt_tokens", "num_output_tokens", "output_tokens_per_second"]
    assert list(report) == [*vllm, *ours, *CIRCUMSTANCES]


def test_acceptance_is_shown_where_there_were_drafts(run):
    greedy = ("throughput", "--num-prompts", "1", "--input-len", "64", "--output-len", "64", "--temperature", "0")
    assert "acceptance length" not in run(*greedy, "--no-speculation")
    assert "acceptance length" in run(*greedy, *NGRAM)


def test_throughput_reads_conversations(run, tmp_path):
    save_tiny_tokenizer(tmp_path)
    turns = [{"from": "human", "value": "a question"}, {"from": "gpt", "value": "an answer"}]
    (tmp_path / "file.json").write_text(json.dumps([{"conversations": turns}] * 2))
    tiny_config("LlamaForCausalLM", vocab_size=264).save_pretrained(tmp_path)
    sharegpt = ("--dataset-name", "sharegpt", "--dataset-path", str(tmp_path / "file.json"), "--num-prompts", "2")
    report = json.loads(run("throughput", "--json", *sharegpt, model=tmp_path))
    assert (report["num_prompt_tokens"], report["num_output_tokens"]) == (2 * len("a question"), 2 * len("an answer"))


@pytest.mark.parametrize("command", [CURVE, LATENCY, THROUGHPUT], ids=lambda command: command[0])
def test_output_json_is_a_file_of_what_json_prints(command, run, tmp_path):
    printed = run(*command, "--json", "--output-json", str(tmp_path / "f"))
    assert json.loads((tmp_path / "f").read_text()) == json.loads(printed)


def test_the_file_is_written_where_nobody_reads_the_output_any_more(folder, tmp_path, monkeypatch):
    class Gone(io.StringIO):
        def write(self, _):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    name, *options = LATENCY
    settings = ("--load-format", "dummy", "--max-model-len", "256", "--output-json", str(tmp_path / "f"))
    assert main(["bench", name, str(folder), *settings, *options]) != 0
    assert json.loads((tmp_path / "f").read_text())["avg_latency"] > 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (CURVE, "whole forward pass"),
        (LATENCY, "Avg latency"),
        (THROUGHPUT, "Throughput:"),
        ((*LATENCY, "--json"), "avg_latency"),
    ],
)
def test_what_was_measured_is_shown_where_its_file_cannot_be_written(command, shown, folder, capsys):
    name, *options = command
    settings = ("--load-format", "dummy", "--max-model-len", "256", "--output-json", "/dev/full")
    assert main(["bench", name, str(folder), *settings, *options]) == 2
    printed = capsys.readouterr()
    assert shown in printed.out
    assert "No space left on device" in printed.err


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("curve", "m", "--rows", "1,x"), "must be whole numbers with commas between them"),
        (("curve", "m", "--rows", "1,0"), "rows: got 0; must be 1 or more"),
        (("curve", "m", "--repeats", "0"), "repeats: got 0; must be 1 or more"),
        (("latency", "m", "--temperature", "-1"), "temperature: got -1.0; must be 0 or more"),
        (("throughput", "m", "--temperature", "inf"), "temperature: got inf; must be 0 or more"),
        (("latency", "m", "--n", "0"), "n: got 0; must be 1 or more"),
        (("latency", "m", "--num-iter", "5"), "Did you mean --num-iters?"),
        (("throughput", "m", "--dataset-name", "burstgpt"), "burstgpt"),
        (("throughput", "m", "--dataset-path", "f.json"), "dataset_path: got f.json"),
        (("throughput", "m", "--dataset-name", "sharegpt", "--dataset-path", "absent.json"), "cannot read absent.json"),
        (("latency", "m", "--output-json", "no-such-folder/f.json"), "give a file in a folder that exists"),
    ],
)
def test_a_mistake_is_one_line_before_any_model_is_loaded(arguments, hint, loader: FakeLoader, capsys):
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert hint in error
    assert error.count("\n") == 1
    assert loader.models == []


def test_model_may_be_given_as_vllm_has_it(monkeypatch):
    asked = []

    def load(model, options):
        asked.append(model)
        raise ModelError("there is no such model")

    monkeypatch.setattr(loading, "load_llm", load)
    main(["bench", "latency", "--model", "m"])
    assert asked == ["m"]


def test_ctrl_c_while_measuring_ends_with_130(folder, monkeypatch):
    def interrupt(probe):
        raise KeyboardInterrupt

    monkeypatch.setattr(instruments.BandwidthProbe, "measure", interrupt)
    assert main(["bench", "curve", str(folder), "--load-format", "dummy", "--contexts", "16", "--rows", "2"]) == 130


@pytest.mark.parametrize(
    ("command", "owner", "name", "at", "said", "measured"),
    [
        (CURVE, BandwidthProbe, "measure", NUM_WARMUP_ROUNDS + 2, "the figures are of 1 of 2 rounds", {"repeats": 1}),
        ((*CURVE, *NGRAM), LLM, "stream", 2, "the drafter was not measured", {"repeats": 2, "drafting": None}),
        (LATENCY, LLM, "generate", 3, "the figures are of 1 of 2 rounds", {}),
        (
            (*THROUGHPUT, "--max-num-seqs", "1", "--no-speculation"),
            *(LLM, "_pump", 6, "the figures are of 1 of 2 requests, which had ended"),
            {"num_requests": 1, "num_prompt_tokens": 16, "num_output_tokens": 5},
        ),
    ],
)
def test_after_ctrl_c_what_was_measured_is_shown_and_saved(
    command, owner, name, at, said, measured, folder, tmp_path, monkeypatch, capsys
):
    interrupt(monkeypatch, owner, name, at=at)
    settings = ("--load-format", "dummy", "--max-model-len", "256", "--json", "--output-json", str(tmp_path / "f"))
    assert main(["bench", command[0], str(folder), *command[1:], *settings]) == 130
    printed = capsys.readouterr()
    assert f"interrupted: {said}" in printed.err
    report = json.loads(printed.out)
    assert report.items() >= ({"interrupted": True} | measured).items()
    assert report == json.loads((tmp_path / "f").read_text())


def test_a_drafter_that_has_no_room_to_be_measured_is_refused_before_the_curve(folder, monkeypatch, capsys):
    monkeypatch.setattr(BandwidthProbe, "measure", lambda _: pytest.fail("measured"))
    settings = ("--load-format", "dummy", "--max-model-len", "191")
    assert main(["bench", str(CURVE[0]), str(folder), *CURVE[1:], *settings, *NGRAM]) == 2
    assert "max_model_len: got 191; a drafter is measured on a text of 192 tokens" in capsys.readouterr().err
