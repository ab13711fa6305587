"""`forerun simulate`: it serves loads and traces, writes what it found, the same for the same seed, and says what is wrong."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from forerun.cli.app import main
from forerun.models.tokenizer import load_tokenizer
from forerun.plan.step_times import MeasuredRange, StepTimeModel
from tests.plan.simulation.profiles import STEP_TIMES, a_profile
from tests.stand_in import VOCAB_SIZE, save_stand_in

MEASURED = MeasuredRange(rows=16, sequences=16, context_tokens=1024, prompt_rows=512)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    a_profile(folder)
    return folder


LOAD = ("--load", "rate=10,isl=30,osl=20", "--num-requests", "30")


def run(folder, *options):
    return main(["simulate", str(folder), *map(str, options)])


def test_it_shows_latencies_and_engines(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    options = ("--config", "suffix", "--replicas", 2, "--routing", "least-requests", "--sla", "ttft=500ms,itl=50ms")
    assert run(folder, *LOAD, *options) == 0
    shown = capsys.readouterr().out
    for text in (
        "30 requests in",
        "keep all limits, ",
        " the SLA asks for (95%): goodput",
        "TTFT",
        "aggregated 1",
        "tokens per step",
        "J per output token",
    ):
        assert text in shown


def test_the_same_seed_gives_the_same_bytes(folder, tmp_path, capsys):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert (
            run(folder, *LOAD, "--config", "auto", "--seed", seed, "--save-result", tmp_path / name, "--save-chunks")
            == 0
        )
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b != c
    capsys.readouterr()


def test_a_result_has_the_keys_of_a_load_test_and_can_be_simulated_again(folder, tmp_path, capsys):
    saved = tmp_path / "result.json"
    assert run(folder, *LOAD, "--save-result", saved, "--save-chunks", "--json") == 0
    document = json.loads(saved.read_text())
    assert json.loads(capsys.readouterr().out).items() <= document.items()
    assert document["completed"] == len(document["ttfts"]) == len(document["itls"]) == 30
    assert {"mean_ttft_ms", "p99_tpot_ms", "output_throughput", "input_lens", "output_lens", "start_times"} <= set(
        document
    )
    assert run(folder, "--trace", saved, "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert again["total_output_tokens"] == document["total_output_tokens"]
    assert again["mean_tpot_ms"] == pytest.approx(document["mean_tpot_ms"], rel=1e-6)


def test_recorded_texts_are_repeated_at_a_rate(folder, capsys):
    assert run(folder, "--recorded", "--config", "suffix", "--rate", 5, "--num-requests", 12, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["total_output_tokens"] == 12 * 40


def test_conversations_have_their_own_lengths(tmp_path, capsys, caplog):
    """Prompts and answers of the file, by the profiled model's tokenizer; what is too long is said."""
    model = save_stand_in(tmp_path / "model")
    a_profile(tmp_path / "profile", model=str(model), vocab_size=VOCAB_SIZE)
    texts = [("hello there", "hello"), ("hi", "how are you"), ("long " * 600, "yes")]
    turns = [{"conversations": [{"value": prompt}, {"value": answer}]} for prompt, answer in texts]
    (tmp_path / "chats.json").write_text(json.dumps(turns))
    options = ("--conversations", tmp_path / "chats.json", "--rate", 5, "--num-requests", 6, "--json")
    assert run(tmp_path / "profile", *options) == 0
    found = json.loads(capsys.readouterr().out)
    encode = load_tokenizer(model).encode
    prompts, answers = (sum(len(encode(text[place])) for text in texts[:2]) for place in (0, 1))
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (3 * prompts, 3 * answers)
    assert "1 of 3 are longer than max_model_len (512), and are left out" in caplog.text


def test_conversations_that_a_drafter_leaves_a_gpu_no_room_for_are_left_out(tmp_path, capsys, caplog):
    """Half of the blocks are left beside it, which hold 256 tokens; the profiled engine took 512."""
    model = save_stand_in(tmp_path / "model")
    on_gpu = {"device": "cuda", "num_blocks": 32, "drafter_block_bytes": {"rates": 16_000}}
    a_profile(tmp_path / "profile", model=str(model), vocab_size=VOCAB_SIZE, **on_gpu)
    turns = [{"conversations": [{"value": prompt}, {"value": "yes"}]} for prompt in ("hello there", "q" * 300)]
    (tmp_path / "chats.json").write_text(json.dumps(turns))
    options = (
        "--conversations",
        tmp_path / "chats.json",
        "--rate",
        5,
        "--num-requests",
        3,
        "--config",
        "rates",
        "--json",
    )
    assert run(tmp_path / "profile", *options) == 0
    assert "1 of 2 are longer than max_model_len (256), and are left out" in caplog.text
    capsys.readouterr()


def test_conversations_with_a_servers_profile_are_counted_by_a_tokenizer_that_is_here(tmp_path, capsys):
    """A server's profile knows the model as it is called there, and no tokens but those that it sent."""
    model = save_stand_in(tmp_path / "model")
    a_profile(tmp_path / "profile", model="as-served", vocab_size=10)
    (tmp_path / "chats.json").write_text(json.dumps([{"conversations": [{"value": "hello there"}, {"value": "hi"}]}]))
    options = ("--conversations", tmp_path / "chats.json", "--rate", 5, "--num-requests", 3, "--json")
    assert run(tmp_path / "profile", *options) != 0
    assert "name the model as it is called here by --tokenizer" in capsys.readouterr().err
    assert run(tmp_path / "profile", *options, "--tokenizer", model) == 0
    encode = load_tokenizer(model).encode
    assert json.loads(capsys.readouterr().out)["total_input_tokens"] == 3 * len(encode("hello there"))


def test_a_request_log_is_simulated(folder, tmp_path, capsys):
    lines = [{"request_log": 1, "block_size": 16}]
    lines += [
        {"timestamp": 1000 * number, "input_length": 40, "output_length": 5, "hash_ids": [1, 2]} for number in range(4)
    ]
    log = tmp_path / "requests.jsonl"
    log.write_text("\n".join(map(json.dumps, reversed(lines[1:]))))
    log.write_text(json.dumps(lines[0]) + "\n" + log.read_text())
    assert run(folder, "--trace", log, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (160, 20)
    assert found["prefix_cache_hit_rate"] == pytest.approx(3 * 32 / 160)


def test_prefill_and_decode_apart(folder, capsys):
    options = ("--prefill-replicas", 1, "--transfer-seconds", 0.01, "--transfer-gigabytes-per-second", 0.001)
    assert run(folder, *LOAD, *options, "--json") == 0
    kinds = [one["kind"] for one in json.loads(capsys.readouterr().out)["replicas"]]
    assert kinds == ["decode", "prefill"]


@pytest.mark.parametrize("arrivals", ["bursts", "day"])
def test_rates_may_change(folder, capsys, arrivals):
    assert run(folder, *LOAD, "--arrivals", arrivals, "--json") == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ((), "requests: got none; give one of --load"),
        ((*LOAD, "--recorded"), "requests: got --load and --recorded"),
        (("--recorded",), "rate: missing"),
        (("--recorded", "--rate", 1), "no trace of drafts of this configuration"),
        (("--load", "rate=0,isl=1,osl=1"), "rate=0"),
        ((*LOAD, "--rate", 3), "rate: given with --load"),
        ((*LOAD, "--burst-factor", 3), "burst_factor: given with --arrivals steady"),
        (
            (*LOAD, "--arrivals", "bursts", "--burst-factor=-5"),
            "burst_factor: got -5; must be a finite number, at least 0",
        ),
        (
            (*LOAD, "--arrivals", "day", "--day-seconds", 1e300),
            "arrivals: got 1e+301 requests until the rate begins again; must be at most 1e+15",
        ),
        ((*LOAD, "--time-scale", 3), "time_scale: given with --load"),
        (("--trace", "x.jsonl", "--num-requests", 3), "num_requests: given with --trace"),
        (("--trace", "x.jsonl"), "x.jsonl: No such file"),
        ((*LOAD, "--config", "suffxi"), "did you mean 'suffix'"),
        ((*LOAD, "--replicas", 0), "replicas: got 0"),
        ((*LOAD, "--max-num-seqs", 0), "max_num_seqs: got 0; must be 1 or more"),
        ((*LOAD, "--max-num-seqs", -1), "max_num_seqs: got -1; must be 1 or more"),
        ((*LOAD, "--max-num-batched-tokens", 0), "max_num_batched_tokens: got 0; must be at least max_num_seqs (8)"),
        ((*LOAD, "--max-num-batched-tokens", -5), "max_num_batched_tokens: got -5; must be at least max_num_seqs (8)"),
        ((*LOAD, "--max-num-seqs", 200), "max_num_batched_tokens: got 128; must be at least max_num_seqs (200)"),
        ((*LOAD, "--transfer-seconds", 1), "nothing is handed over without --prefill-replicas"),
        ((*LOAD, "--transfer-seconds", "inf", "--prefill-replicas", 1), "transfer: got inf s"),
        (
            (*LOAD, "--prompt-class", "chat"),
            "prompt_class: got 'chat' with --config plain, which drafts nothing; it applies",
        ),
        ((*LOAD, "--sla", "ttft=0s"), "ttft=0"),
        ((*LOAD, "--save-chunks"), "save_chunks: given without save_result"),
        ((*LOAD, "--save-result", "/nowhere/x.json"), "save_result: cannot write"),
        (("--load", "rate=1,isl=900,osl=20"), "900 prompt and 20 output tokens, together more than max_model_len"),
    ],
)
def test_what_is_wrong_is_said_on_one_line(folder, capsys, options, problem):
    assert run(folder, *options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert problem in line


def test_steps_beyond_what_was_measured_are_said(tmp_path, capsys):
    """The profile has steps of up to 16 sequences, and of 1024 tokens of context."""
    a_profile(
        tmp_path, step_times=StepTimeModel(STEP_TIMES.weights, measured=MEASURED), max_num_seqs=32, num_blocks=900
    )
    assert run(tmp_path, *LOAD, "--json") == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == []
    assert run(tmp_path, "--load", "rate=900,isl=60,osl=60", "--num-requests", 60, "--json") == 0
    shown = capsys.readouterr()
    beyond = json.loads(shown.out)["warnings"]
    said = [re.fullmatch(r"not measured: steps of (\d+) ([a-z ]+) \(up to (\d+) were .*", one) for one in beyond]
    assert [(one[2], int(one[3])) for one in said] == [("rows", 16), ("sequences", 16), ("tokens of context", 1024)]
    assert all(int(one[1]) > int(one[3]) for one in said)
    assert all(one in shown.err for one in beyond)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--arrivals", "day"), "30 requests are 0.0% of those of a day, which begins at its lowest rate"),
        (("--arrivals", "day", "--day-seconds", 6), "give --num-requests 60, or a smaller --day-seconds"),
        (("--arrivals", "bursts"), "30 requests are 5.0% of those of the time from one burst to the next"),
        (("--arrivals", "day", "--day-seconds", 3), None),
        (("--arrivals", "bursts", "--burst-every", 3, "--burst-length", 1), None),
    ],
)
def test_requests_that_end_before_the_rate_has_had_its_round_are_said(folder, capsys, options, said):
    assert run(folder, *LOAD, *options, "--json") == 0
    shown = capsys.readouterr()
    warnings = [one for one in json.loads(shown.out)["warnings"] if one.startswith("arrivals: ")]
    assert len(warnings) == (said is not None)
    assert all(said in one and one in shown.err for one in warnings)


def test_the_picture_is_of_the_kv_memory_that_the_simulated_engines_had(tmp_path, capsys, monkeypatch):
    """On a GPU a drafter leaves fewer blocks than were profiled."""
    drawn = []
    picture = SimpleNamespace(draw_simulation=lambda *_, num_blocks, sla: drawn.append(num_blocks))
    monkeypatch.setitem(sys.modules, "forerun.bench.simulation_picture", picture)
    monkeypatch.setattr("forerun.cli.options.find_spec", lambda name: name)  # matplotlib is not needed here
    a_profile(tmp_path, device="cuda", drafter_block_bytes={"rates": 16_000})
    for config in ("plain", "rates"):
        assert run(tmp_path, *LOAD, "--config", config, "--plot", tmp_path / "picture.svg") == 0
    assert drawn == [200, 100]
    capsys.readouterr()


def test_a_seed_below_zero_is_refused(folder, capsys):
    assert run(folder, *LOAD, "--seed", -1) == 2
    assert "seed: got -1; must be 0 or more" in capsys.readouterr().err


def test_two_requests_may_be_any_time_apart(folder, tmp_path, capsys):
    """The fault: a table with a place for each second between them."""
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": at, "input_length": 20, "output_length": 5, "hash_ids": []} for at in (0, 1, 10**15)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    assert run(folder, "--trace", trace, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["completed"], found["max_concurrent_requests"]) == (3, 2)


def test_a_folder_without_a_profile_is_refused(tmp_path, capsys):
    assert run(tmp_path, *LOAD) == 2
    assert "has no profile.json" in capsys.readouterr().err


def test_what_a_servers_steps_were_not_measured_for_is_said_of_those_with_its_drafts(tmp_path, caplog):
    """Of a profile that was put together: its plain steps are those of another start of the server."""
    plain, drafting = (
        StepTimeModel(STEP_TIMES.weights, measured=replace(MEASURED, context_tokens=tokens)) for tokens in (10, 10_000)
    )
    a_profile(tmp_path, step_times=plain, served_steps={"rates": drafting})
    assert run(tmp_path, *LOAD, "--config", "rates", "--json") == 0
    assert "tokens of context" not in caplog.text
    assert run(tmp_path, *LOAD, "--json") == 0
    assert "tokens of context (up to 10 were measured)" in caplog.text
