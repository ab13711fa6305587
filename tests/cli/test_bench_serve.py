"""`forerun bench serve` against a fake server: output, JSON, files, mistakes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
from importlib.util import find_spec

import pytest

from forerun.bench.load.report import is_reserved
from forerun.bench.load.server import Server
from forerun.cli.app import main
from forerun.errors import ConfigError
from tests.bench.load.fake_server import Script, serving
from tests.tiny_tokenizer import save_tiny_tokenizer

CHAT = ("--backend", "openai-chat", "--dataset-name", "custom", "--output-len", "8")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return str(save_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def server(tokenizer, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with serving(Script(listed=[{"id": "fake", "root": tokenizer}], chunks=[1, 4, 3])) as script:
        yield script


@pytest.fixture
def run(server, capsys, tmp_path):
    """Run the benchmark; what is printed."""

    def run(*options, code=0, random=True):
        prompts = ("--input-len", "12", "--output-len", "8", "--num-prompts", "5") if random else ()
        address = () if "--base-url" in options else ("--base-url", server.url)
        powercap = ("--powercap-root", str(tmp_path / "powercap"), "--energy-idle-seconds", "0")
        assert main(["bench", "serve", *address, *powercap, *prompts, *options]) == code
        return capsys.readouterr()

    return run


def test_the_block_has_vllms_words_in_50_columns(run):
    lines = run("--max-concurrency", "2", "--request-rate", "100", "--goodput", "ttft:10000").out.splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[-1] == "=" * 50
    shown = dict(re.match(r"(.+?:) +(\S+) *$", line).groups() for line in lines if re.match(r".+?: +\S+ *$", line))
    assert {name: shown[name] for name in shown if re.fullmatch(r"\d+", shown[name])} == {
        "Successful requests:": "5",
        "Failed requests:": "0",
        "Maximum request concurrency:": "2",
        "Total input tokens:": "35",
        "Total generated tokens:": "40",
        "Drafts:": "50",
        "Draft tokens:": "150",
        "Accepted tokens:": "100",
    }
    assert shown["Request rate configured (RPS):"] == "100.00"
    assert (shown["Acceptance rate (%):"], shown["Acceptance length:"]) == ("66.67", "3.00")
    assert (shown["  Position 0:"], shown["  Position 2:"]) == ("100.00", "0.00")
    assert "---------------Time to First Token----------------" in lines
    assert "P99 TPOT (ms):" in shown
    assert all(line.index(shown[name]) >= 41 for name in ("Mean ICL (ms):",) for line in lines if line.startswith(name))


def test_json_has_vllms_keys_and_ours(run, server, tokenizer):
    (line,) = run("--json", "--metadata", "tp=1", "note=a b").out.splitlines()
    report = json.loads(line)
    vllm = """date endpoint_type backend label model_id tokenizer_id num_prompts request_rate burstiness max_concurrency
        duration completed failed total_input_tokens total_output_tokens request_throughput request_goodput
        output_throughput total_token_throughput max_output_tokens_per_s max_concurrent_requests
        spec_decode_acceptance_rate spec_decode_acceptance_length spec_decode_num_drafts spec_decode_draft_tokens
        spec_decode_accepted_tokens spec_decode_per_position_acceptance_rates"""
    assert set(vllm.split()) <= set(report)
    assert {
        f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl")
    } <= set(report)
    assert (report["tp"], report["note"], report["request_rate"], report["schema_version"]) == ("1", "a b", "inf", 1)
    assert (report["model_id"], report["tokenizer_id"]) == (tokenizer, tokenizer)
    assert report["peak_output_token_throughput"] == pytest.approx(report["max_output_tokens_per_s"] * 8 / 3)
    assert report["energy"]["method"] == "unavailable"
    assert report["energy"]["j_per_output_token"] is None
    assert report["environment"]["server"] == {"base_url": server.url, "version": '{"version": "fake 1"}'}
    assert all(map(is_reserved, set(report) - {"tp", "note"}))


def test_every_request_is_sent_with_the_options_sampling(run, server):
    run("--temperature", "0", "--extra-body", '{"seed": 3}', "--header", "x-team=blue", "--request-id-prefix", "t-")
    assert len(server.bodies) == 5
    body = server.bodies[0]
    assert (body["temperature"], body["seed"], body["ignore_eos"], body["max_tokens"]) == (0, 3, True, 8)
    assert "top_p" not in body
    assert server.headers[0]["x-team"] == "blue"
    assert sorted(headers["x-request-id"] for headers in server.headers) == [f"t-{number}" for number in range(5)]


def test_a_key_comes_from_the_environment(run, server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    run()
    assert server.headers[0]["Authorization"] == "Bearer secret"


def test_warm_ups_have_prompts_of_their_own_and_do_not_count(run, server):
    report = json.loads(run("--json", "--num-warmups", "2").out)
    prompts = [body["prompt"] for body in server.bodies]
    assert (len(prompts), len(set(prompts)), report["completed"], report["spec_decode_num_drafts"]) == (7, 7, 5, 50)


def test_warm_ups_are_as_many_as_asked_for_where_a_file_has_fewer(run, server, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"one two {word}"}) for word in ("a", "b", "c")))
    for num_prompts in (2, 3):
        server.bodies.clear()
        options = ("--dataset-name", "custom", "--dataset-path", str(file), "--num-prompts", str(num_prompts))
        run("--num-warmups", "4", "--no-oversample", *options, random=False)
        assert len(server.bodies) == 4 + num_prompts


def test_max_concurrency_holds_at_the_server(run, server):
    server.delay = 0.02
    run("--max-concurrency", "2")
    assert server.most_at_once == 2


def test_a_duration_sends_until_it_is_over(run, server):
    server.delay = 0.01
    report = json.loads(run("--json", "--duration", "0.3", "--max-concurrency", "2").out)
    assert report["completed"] == len(server.bodies) >= 2
    assert (report["target_duration"], report["num_prompts"], report["unsent"]) == (0.3, 5, 0)
    assert report["duration"] >= 0.3


def test_a_ramp_is_in_the_result(run):
    ramp = ("--ramp-up-strategy", "linear", "--ramp-up-start-rps", "20", "--ramp-up-end-rps", "40")
    report = json.loads(run("--json", *ramp).out)
    assert (report["ramp_up_strategy"], report["ramp_up_start_rps"], report["ramp_up_end_rps"]) == ("linear", 20, 40)
    assert [event["rps"] for event in report["rps_change_events"]] == list(range(20, 41))


def test_a_chat_needs_no_tokenizer(run, server, tmp_path):
    server.listed = [{"id": "unheard-of"}]
    (tmp_path / "f.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    file = ("--dataset-path", str(tmp_path / "f.jsonl"), "--num-prompts", "2")
    report = json.loads(run("--json", *CHAT, *file, random=False).out)
    assert (report["model_id"], report["total_output_tokens"]) == ("unheard-of", 16)
    assert server.bodies[0]["model"] == "unheard-of"
    assert {body["messages"][0]["content"] for body in server.bodies} == {"one", "two"}
    assert "ignore_eos" not in server.bodies[0]


def test_tokens_that_the_server_does_not_count_are_counted_here(run, server):
    server.usage = "none"
    printed = run("--json")
    assert json.loads(printed.out)["total_output_tokens"] == 40  # of one character each
    assert json.loads(printed.out)["total_input_tokens"] == 60
    assert "5 answers came without usage" in printed.err


def test_a_run_is_kept_where_nobody_can_count_its_tokens(run, server, tmp_path):
    """The server sends no usage, and the model's folder is on another machine."""
    server.usage, server.listed = "none", [{"id": "fake", "root": str(tmp_path / "elsewhere")}]
    server.delay = 0.01
    (tmp_path / "f.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    words = (
        *CHAT,
        "--dataset-path",
        str(tmp_path / "f.jsonl"),
        "--num-prompts",
        "2",
        "--goodput",
        "ttft:10000",
        "tpot:10000",
    )
    plot = ("--plot", str(tmp_path / "load.svg")) if find_spec("matplotlib") else ()
    saved = ("--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json")
    printed = run(*words, *saved, *plot, random=False)
    assert "their tokens are not known" in printed.err
    assert "--tokenizer" in printed.err
    assert re.search(r"Total generated tokens: +-", printed.out)
    found = json.loads((tmp_path / "r.json").read_text())
    unknown = (
        "total_input_tokens total_output_tokens output_throughput total_token_throughput mean_tpot_ms request_goodput"
    )
    assert {found[name] for name in [*unknown.split(), "peak_output_token_throughput", "chunk_tokens_from"]} == {None}
    assert (found["completed"], found["output_lens"]) == (2, [None, None])
    assert min(found["request_throughput"], found["mean_ttft_ms"], found["mean_e2el_ms"], found["mean_icl_ms"]) > 0


def test_what_was_measured_is_shown_before_files_are_written(run, monkeypatch):
    def fail(*_, **__):
        raise ConfigError("result_filename: cannot write f.json (No space left on device); give another file")

    monkeypatch.setattr("forerun.bench.load.report.save", fail)
    printed = run("--save-result", code=2)
    assert "Successful requests:                     5" in printed.out
    assert "No space left on device" in printed.err


def test_what_was_measured_is_printed_as_json_before_files_are_written(run, monkeypatch):
    def fail(*_, **__):
        raise ConfigError("result_filename: cannot write f.json (No space left on device); give another file")

    monkeypatch.setattr("forerun.bench.load.report.save", fail)
    assert json.loads(run("--save-result", "--json", code=2).out)["completed"] == 5


def test_results_are_saved_under_vllms_name(run, tmp_path):
    folder = tmp_path / "results"
    run("--save-result", "--result-dir", str(folder), "--max-concurrency", "3", "--label", "try")
    (file,) = folder.iterdir()
    assert re.fullmatch(r"try-infqps-concurrency3-tokenizer\d-\d{8}-\d{6}\.json", file.name)
    assert "ttfts" not in json.loads(file.read_text())


def test_details_are_one_entry_per_request(run, server, tmp_path):
    server.usage = "continuous"
    run("--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "f.json")
    report = json.loads((tmp_path / "f.json").read_text())
    names = "input_lens output_lens ttfts itls latencies start_times queue_times generated_texts errors"
    assert {len(report[name]) for name in names.split()} == {5}
    assert (report["output_lens"], report["generated_texts"][0], report["errors"][0]) == ([8] * 5, "x" * 8, "")
    assert (report["chunk_tokens"][0], report["chunk_tokens_from"]) == ([1, 4, 3], "usage")
    assert [len(gaps) for gaps in report["itls"]] == [2] * 5


def test_results_are_appended_line_by_line(run, tmp_path):
    for _ in range(2):
        run("--append-result", "--result-dir", str(tmp_path), "--result-filename", "f.json")
    reports = [json.loads(line) for line in (tmp_path / "f.json").read_text().split("\n")]
    assert [report["completed"] for report in reports] == [5, 5]


def test_a_picture_is_drawn(run, tmp_path):
    pytest.importorskip("matplotlib")
    run("--plot", str(tmp_path / "load.svg"))
    drawn = (tmp_path / "load.svg").read_text()
    assert all(f"<!-- {text} -->" in drawn for text in ("output tokens/s", "to the first token", "TTFT", "E2EL"))


@pytest.fixture
def hears_ctrl_c():
    """The process is interrupted by Ctrl-C, which one that a shell has started in the background ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hears_ctrl_c")
def test_after_an_interruption_what_was_answered_is_shown_and_saved_as_a_part(run, server, tmp_path):
    def interrupt():
        if len(server.bodies) == 3:
            server.first_delay = 1.5  # of this one's answer
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()

    server.on_request = interrupt
    saved = ("--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "f.json")
    printed = run("--max-concurrency", "1", *saved, code=130)
    assert "interrupted: the figures are of 2 requests that had ended; 1 more had been sent" in printed.err
    assert re.search(r"Successful requests: +2\b", printed.out)
    assert re.search(r"Unfinished requests \(interrupted\): +1\b", printed.out)
    report = json.loads((tmp_path / "f.json").read_text())
    assert (report["interrupted"], report["completed"], report["failed"]) == (True, 2, 0)
    assert (report["unfinished"], report["unsent"], len(report["ttfts"])) == (1, 2, 2)


@pytest.mark.usefixtures("hears_ctrl_c")
def test_an_interruption_after_the_last_answer_loses_none(run, monkeypatch):
    draft_counts, looks = Server.draft_counts, []

    async def interrupted(server):
        looks.append(1)
        if len(looks) == 2:  # after the run
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(10)
        return await draft_counts(server)

    monkeypatch.setattr(Server, "draft_counts", interrupted)
    printed = run(code=130)
    assert "interrupted: the figures are of 5 requests that had ended; 0 more had been sent" in printed.err
    assert re.search(r"Successful requests: +5\b", printed.out)


def test_failures_are_counted_and_each_error_is_printed_once(run, server):
    server.error_after = 1
    printed = run(code=1)
    assert "Failed requests:                         5" in printed.out
    assert printed.err.count("5 failed: error in the stream: out of luck") == 1


def test_energy_is_measured_where_there_is_a_sensor(run, server, tmp_path):
    folder = tmp_path / "powercap" / "intel-rapl:0"
    folder.mkdir(parents=True)
    for name, text in (("name", "package-0"), ("energy_uj", "5"), ("max_energy_range_uj", "100000000")):
        (folder / name).write_text(text)

    def count() -> None:  # in one move, as the system does: the sensor is read meanwhile, and never found empty
        (folder / "next").write_text(str(len(server.bodies) * 2_000_000 + 5))
        (folder / "next").replace(folder / "energy_uj")

    server.on_request = count
    energy = json.loads(run("--json").out)["energy"]
    assert (energy["method"], energy["cpu_j"], energy["j_per_request"]) == ("rapl", 10.0, 2.0)
    assert (energy["j_per_output_token"], energy["tokens_per_j"], energy["gpu_j"]) == (0.25, 4.0, None)
    assert (energy["reason"] is None, energy["scope"]) == (False, "package-0 (intel-rapl:0)")


def test_without_a_sensor_the_block_says_why(run):
    printed = " ".join(run().out.split())
    assert "Energy" in printed
    assert "Not measured: " in printed
    assert "no RAPL counter under" in printed


def test_a_server_elsewhere_has_no_energy_of_ours(monkeypatch):
    from forerun.cli.bench_serve_options import ServerOptions

    assert [
        ServerOptions(base_url=url).is_local for url in ("http://127.0.0.1:1", "http://localhost", "http://a.b")
    ] == [
        True,
        True,
        False,
    ]
    assert ServerOptions(host="::1").is_local


def test_a_server_that_loads_is_waited_for_if_asked(run, server, monkeypatch):
    monkeypatch.setattr("forerun.bench.load.server.RETRY_SECONDS", 0.01)
    server.num_loading = 3
    assert "still loading; give --ready-check-timeout-sec" in run(code=2).err
    run("--ready-check-timeout-sec", "10")
    assert (server.num_loading, len(server.bodies)) == (-1, 5)


def test_the_models_name_in_requests_may_be_given(run, server, tokenizer):
    report = json.loads(run("--json", "--model", tokenizer, "--served-model-name", "mine").out)
    assert (report["model_id"], server.bodies[0]["model"]) == (tokenizer, "mine")


def test_without_a_server_it_ends_with_one_line(run):
    error = run("--base-url", "http://127.0.0.1:9", code=2).err
    assert "http://127.0.0.1:9: no server answers" in error
    assert error.count("\n") == 1


def test_a_server_without_models_needs_the_option_model(run, server):
    server.listed = []
    assert "give --model" in run(code=2).err


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf"])
def test_a_time_of_rest_that_is_none_is_refused_before_anything_is_sent(seconds, server, capsys):
    assert main(["bench", "serve", "--base-url", server.url, "--energy-idle-seconds", seconds]) == 2
    assert f"--energy-idle-seconds: got {seconds}; must be 0" in capsys.readouterr().err
    assert not server.bodies


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("--percentile-metrics", "ttft,tpott"), "--percentile-metrics: got 'tpott'; did you mean 'tpot'?"),
        (("--metric-percentiles", "50,101"), "--metric-percentiles: got '50,101'"),
        (("--goodput", "itl:5"), "--goodput: got 'itl:5'; must be ttft, tpot, e2el"),
        (("--goodput", "ttft:5", "ttft:6"), "--goodput: got 'ttft:6', and ttft before; give it once"),
        (("--goodput", "ttft=5"), "--goodput: got 'ttft=5'; must be NAME:MILLISECONDS"),
        (("--metadata", "tp"), "--metadata: got 'tp'; must be KEY=VALUE"),
        (("--metadata", "duration=1"), "--metadata: got duration, which the result has itself"),
        (("--header", "x"), "--header: got 'x'; must be KEY=VALUE"),
        (("--extra-body", "[1]"), "--extra-body: got [1]; must be a JSON object"),
        (("--endpoint", "/v1/embeddings"), "--endpoint: got /v1/embeddings; must end in /completions"),
        (("--endpoint", "/v1/chat/completions"), "with --backend openai"),
        (("--base-url", "127.0.0.1:9"), "--base-url: got '127.0.0.1:9'; must be a URL"),
        (("--save-detailed",), "--save-detailed: nothing is saved"),
        (("--port", "9"), "leave out --host and --port, or it"),
        (("--ready-check-timeout-sec", "nan"), "--ready-check-timeout-sec: got nan; must be 0 or more"),
        (("--burstiness", "2"), "burstiness: got 2, and there is no rate"),
        (("--plot", "picture.doc"), "--plot: cannot write picture.doc"),
        (("--dataset-name", "burstgpt"), "burstgpt"),
        (("--request-rate", "0"), "request_rate: got 0.0; must be more than 0"),
        (("--num-prompt", "5"), "Did you mean --num-prompts?"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_sent(arguments, hint, run, server):
    error = run(*arguments, code=2, random=False).err
    assert hint in error
    assert error.count("\n") == 1
    assert server.bodies == []
