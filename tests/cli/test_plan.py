"""`forerun plan`: what it plans, writes and shows, and what is wrong with what it was given."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

from forerun.cli.app import main
from forerun.plan.deployment_plan import DeploymentPlan, Layout
from tests.plan.profiles import fake_profile

SLA, LOAD = ("--sla", "ttft=500ms,itl=20ms"), ("--load", "rate=50,isl=200,osl=60")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    fake_profile(folder)
    return folder


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """An hour of rising and falling traffic, in mooncake's format."""
    path = tmp_path_factory.mktemp("trace") / "hour.jsonl"
    times, now = [], 0.0
    while now < 3600.0:
        now += 1.0 / (2.0 + 1.5 * math.sin(2 * math.pi * now / 3600.0))
        times.append(now)
    lines = [{"timestamp": round(1000 * time), "input_length": 200, "output_length": 60} for time in times]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def run(folder, *options):
    return main(["plan", str(folder), *map(str, options)])


def test_it_says_what_to_run_and_what_requests_will_see(folder, capsys):
    assert run(folder, *SLA, *LOAD) == 0
    shown = capsys.readouterr().out
    for text in ("engines:", "each for whole requests", "drafts:", "K = ", "within SLA:", "TTFT", "TPOT", "500", "p95"):
        assert text in shown


def test_the_plan_is_written_for_emit(folder, tmp_path, capsys):
    assert run(folder, *SLA, *LOAD, "--layout", "disaggregated", "--output", tmp_path / "plan", "--json") == 0
    written = DeploymentPlan.load_file(tmp_path / "plan")
    assert written.layout is Layout.DISAGGREGATED
    assert written.replicas == written.prefill_replicas + written.decode_replicas
    assert json.loads(capsys.readouterr().out) == written.to_json()


def test_the_simulator_confirms(folder, capsys):
    assert run(folder, *SLA, *LOAD, "--confirm", "--num-requests", 50) == 0
    assert "of 50 in the simulator" in capsys.readouterr().out


def test_what_answers_of_one_token_have_not_is_not_without_end(folder, capsys):
    assert run(folder, "--load", "rate=2,isl=100,osl=1", *SLA, "--confirm", "--num-requests", 20) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.lstrip().startswith("TPOT"))
    assert row.split()[1:9] == ["0"] * 4 + ["-"] * 4


def test_an_infeasible_sla_is_said_with_the_best_that_can_be_done(folder, tmp_path, capsys):
    assert run(folder, "--sla", "ttft=5ms", *LOAD, "--budget", 2, "--output", tmp_path) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "INFEASIBLE: 95% of requests within the SLA cannot be had" in shown
    assert "no number of engines is enough: ttft: an idle engine takes" in shown
    assert not DeploymentPlan.load_file(tmp_path).feasible


def test_what_is_wanted_is_shown_as_it_was_given(folder, capsys):
    assert run(folder, "--sla", "ttft=5ms,attainment=0.999", *LOAD, "--budget", 2) == 1
    assert "INFEASIBLE: 99.9% of requests within the SLA" in " ".join(capsys.readouterr().out.split())


def test_a_small_budget_says_how_many_engines_would_do(folder, capsys):
    assert run(folder, *SLA, *LOAD, "--budget", 4, "--devices-per-engine", 2) == 1
    assert "4 engines would be enough; give a larger --budget" in capsys.readouterr().out


def test_how_busy_engines_are_is_shown_of_each_kind(folder, capsys):
    assert run(folder, *SLA, *LOAD, "--layout", "disaggregated") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"busy: those for prompts \d+% of, those for answers \d+% of what they can do", shown)


def test_an_engine_takes_as_many_devices_as_its_profile_had_processes(tmp_path, capsys):
    replace(fake_profile(), tensor_parallel_size=2, traces={}).save(tmp_path)
    assert run(tmp_path, *SLA, *LOAD, "--budget", 1) == 2
    assert "one engine takes 2" in capsys.readouterr().err


def test_running_engines_are_given_up_only_where_the_others_stay_unbusy(folder, capsys):
    def planned(*options):
        assert run(folder, *SLA, *LOAD, "--json", *options) == 0
        return json.loads(capsys.readouterr().out)["replicas"]

    fewest = planned()
    assert fewest <= planned("--running", fewest + 1) <= fewest + 1
    assert planned("--running", 20) < 20


def test_engines_that_run_are_not_kept_beyond_the_budget(folder, capsys):
    options = ("--load", "rate=60,isl=200,osl=60", "--budget", 4, "--running", 5)
    assert run(folder, *SLA, *options, "--json") == 0
    assert json.loads(capsys.readouterr().out)["replicas"] <= 4


def test_corrections_are_learnt_and_shown(folder, tmp_path, capsys):
    """Of a service that takes 20 ms for each step, with one request at a time."""
    test = {
        "start_times": [float(number) for number in range(20)],
        "input_lens": [100] * 20,
        "output_lens": [21] * 20,
        "ttfts": [0.02] * 20,
        "itls": [[0.006] * 20] * 20,
    }
    (tmp_path / "test[new].json").write_text(json.dumps(test))
    options = ("--observed", tmp_path / "test[new].json", "--output-json", tmp_path / "plan.json")
    assert run(folder, *SLA, *LOAD, *options) == 0
    found = json.loads((tmp_path / "plan.json").read_text())["corrections"]
    assert found["learnt_from"] == ["test[new].json"]
    assert found["acceptance_factor"] == 1.0
    assert 1.0 < found["time_factor"] < 2.0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        f"corrected: a step takes {found['time_factor']:.3g} times as long as profiled, and drafts add 1 times" in shown
    )
    assert "learnt from test[new].json" in shown


def test_a_day_is_replayed(folder, trace, tmp_path, capsys):
    options = ("--replay", trace, "--interval", 300, "--predictor", "constant", "--predictor", "ar")
    assert run(folder, *SLA, *options, "--output-json", tmp_path / "day.json") == 0
    shown = capsys.readouterr().out
    for text in ("engine hours", "constant", "ar", "oracle", "fixed: peak", "fixed: mean"):
        assert text in shown
    days = json.loads((tmp_path / "day.json").read_text())["days"]
    assert [day["name"] for day in days] == ["constant", "ar", "oracle", "fixed: peak", "fixed: mean"]
    assert sum(one["num_requests"] for one in days[0]["intervals"]) == len(trace.read_text().splitlines())


def test_a_prefix_hit_rate_of_nothing_is_one_that_was_given(folder, tmp_path, capsys):
    """Each prompt begins alike, which the trace's own share would count."""
    lines = [
        {"timestamp": 250 * number, "input_length": 600, "output_length": 10, "hash_ids": [1, 2 + number]}
        for number in range(80)
    ]
    (tmp_path / "day.jsonl").write_text("\n".join(map(json.dumps, lines)))

    def notes(load):
        options = ("--replay", tmp_path / "day.jsonl", "--interval", 10, "--predictor", "constant", "--load", load)
        assert run(folder, *SLA, *options, "--output-json", tmp_path / "plan.json") in (0, 1)
        capsys.readouterr()
        return json.loads((tmp_path / "plan.json").read_text())["warnings"]

    assert any("0% are in the beginning" in one for one in notes("rate=4,isl=600,osl=10,prefix_hit_rate=0"))
    assert not any("are in the beginning" in one for one in notes("rate=4,isl=600,osl=10"))


def test_a_day_is_simulated_as_it_was_decided(folder, tmp_path, capsys):
    lines = [{"timestamp": 250 * number, "input_length": 200, "output_length": 60} for number in range(160)]
    trace = tmp_path / "short.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)))
    options = ("--replay", trace, "--interval", 10, "--predictor", "constant", "--confirm", "--num-requests", 20)
    assert run(folder, *SLA, *options, "--output-json", tmp_path / "day.json") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count(" simulated ") == 4
    for day in json.loads((tmp_path / "day.json").read_text())["days"]:
        assert len(day["simulated"]["attained"]) == len(day["intervals"]) == 4
        assert day["simulated"]["engine_hours"] >= 0.999 * day["engine_hours"]
        assert 0.0 <= day["simulated"]["worst_interval_attainment"] <= day["simulated"]["attainment"] <= 1.0


def test_a_request_of_a_day_that_is_too_long_is_refused(folder, tmp_path, capsys):
    lines = [{"timestamp": 1000 * number, "input_length": 5000, "output_length": 60} for number in range(400)]
    (tmp_path / "long.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert run(folder, *SLA, *LOAD, "--replay", tmp_path / "long.jsonl") == 2
    assert "more than max_model_len (4096)" in capsys.readouterr().err


def test_a_request_of_a_day_that_a_drafter_leaves_a_gpu_no_room_for_is_refused(tmp_path, capsys):
    """Of the 300 blocks 148 are left beside the head and its KV, and one request takes more."""
    save_file({"fc.weight": np.zeros((1000, 1000), np.float32)}, tmp_path / "model.safetensors")
    profile = fake_profile()
    head = profile.configs["head"] | {"model": str(tmp_path)}
    replace(
        profile,
        device="cuda",
        num_blocks=300,
        max_model_len=4800,
        configs=profile.configs | {"head": head},
        drafter_block_bytes={"head": 16 * profile.kv_bytes_per_token, "suffix": 0},
    ).save(tmp_path)
    lines = [
        {"timestamp": 250 * at, "input_length": 3000 if at == 7 else 400, "output_length": 60} for at in range(160)
    ]
    (tmp_path / "day.jsonl").write_text("\n".join(map(json.dumps, lines)))
    wanted = ("--sla", "ttft=2s,itl=50ms", "--load", "rate=5,isl=400,osl=60", "--budget", 1)
    day = ("--replay", tmp_path / "day.jsonl", "--interval", 10, "--predictor", "constant")
    assert run(tmp_path, *wanted, *day, "--method", "head") == 2
    assert "number 7 (from 0) has 3000 prompt and 60 output tokens, together more than max_model_len (2368)" in (
        capsys.readouterr().err
    )
    assert run(tmp_path, *wanted, *day, "--method", "plain") in (0, 1)


def test_a_day_of_less_than_a_period_says_that_harmonic_is_constant(folder, trace, capsys):
    options = ("--replay", trace, "--interval", 600, "--predictor", "harmonic", "--json")
    assert run(folder, *SLA, *options) == 0
    assert any("harmonic predicts the last value" in one for one in json.loads(capsys.readouterr().out)["warnings"])
    assert run(folder, *SLA, *options, "--period", 1800) == 0
    assert not any("harmonic" in one for one in json.loads(capsys.readouterr().out)["warnings"])


def test_a_day_is_drawn(folder, trace, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "day.svg"
    options = ("--interval", 600, "--predictor", "kalman", "--picture", picture)
    assert run(folder, *SLA, "--replay", trace, *options) == 0
    assert "engines" in picture.read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--sla", "ttft=0ms", *LOAD), "must be above 0"),
        (("--sla", "ttft=500", *LOAD), "with its unit"),
        ((*SLA, "--load", "rate=20"), "isl, osl missing"),
        (SLA, "give --load, e.g. rate=20"),
        ((*SLA, *LOAD, "--budget", 0), "must be 1 or more"),
        ((*SLA, *LOAD, "--budget", 1, "--devices-per-engine", 2), "must be at least that"),
        ((*SLA, *LOAD, "--devices-per-engine", 2), "devices_per_engine: got 2, and no budget is given"),
        ((*SLA, *LOAD, "--method", "suffx"), "did you mean 'suffix'"),
        ((*SLA, *LOAD, "--seed", 3), "given without --confirm"),
        ((*SLA, *LOAD, "--confirm", "--seed", -1), "seed: got -1; must be 0 or more"),
        ((*SLA, *LOAD, "--interval", 60), "given without --replay"),
        ((*SLA, *LOAD, "--period", 60), "given without --replay"),
        (
            (*SLA, *LOAD, "--predictor", "kalman"),
            "predictor: given without --replay, to whose day of traffic it applies",
        ),
        ((*SLA, *LOAD, "--predictor", "constant"), "predictor: given without --replay"),
        (
            (*SLA, *LOAD, "--transfer-seconds", 0.01),
            "transfer_seconds: got 0.01 with --layout aggregated, where nothing is handed over; it applies to --layout",
        ),
        (
            (*SLA, *LOAD, "--transfer-gigabytes-per-second", 5),
            "transfer_gigabytes_per_second: got 5 with --layout aggr",
        ),
        ((*SLA, *LOAD, "--observed", "x.json", "--time-factor", 1.1), "contradicts --time-factor"),
        ((*SLA, *LOAD, "--observed-config", "suffix"), "given without --observed"),
        ((*SLA, *LOAD, "--observed", "nothing.json"), "give the result of a load test"),
        *(
            ((*SLA, *LOAD, "--time-factor", factor), f"time_factor: got {factor:g}; must be from 0.001 to 1000")
            for factor in (0, 1e300)
        ),
        ((*SLA, "--load", "rate=1,isl=5000,osl=10"), "must be at most that: profile with"),
        ((*SLA, "--replay", "nothing.jsonl"), "nothing.jsonl"),
    ],
)
def test_what_is_wrong_is_said(folder, options, said, capsys):
    assert run(folder, *options) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--interval", 1e-6), "more than 50,000; must be at least"),
        (("--period", 60), "must be at least two of them"),
        (("--period", 3600, "--predictor", "ar"), "given without the predictor harmonic"),
        (("--period", 0), "must be above 0"),
    ],
)
def test_what_is_wrong_with_a_day_is_said(folder, trace, options, said, capsys):
    assert run(folder, *SLA, "--replay", trace, *options) == 2
    assert said in capsys.readouterr().err


def test_a_predictor_that_there_is_not_is_refused(folder, trace, capsys):
    assert run(folder, *SLA, "--replay", trace, "--predictor", "lstm") == 2
    assert "must be one of constant, ar" in capsys.readouterr().err


@pytest.mark.parametrize("options", [("--prompt-class", "chat"), ("--confidence", 0.9), ("--acceptance-factor", 0.9)])
def test_what_narrows_acceptance_is_refused_where_nothing_drafts(tmp_path, options, capsys):
    replace(fake_profile(), configs={}, drafting={}, acceptance={}).save(tmp_path)
    assert run(tmp_path, *SLA, *LOAD) == 0
    capsys.readouterr()
    assert run(tmp_path, *SLA, *LOAD, *options) == 2
    assert "the profile has no configuration of drafts, to whose acceptance it applies" in capsys.readouterr().err


@pytest.mark.parametrize("options", [("--prompt-class", "chat"), ("--confidence", 0.9), ("--acceptance-factor", 0.9)])
def test_what_narrows_acceptance_is_refused_where_nothing_may_draft(folder, options, capsys):
    assert run(folder, *SLA, *LOAD, "--method", "plain", *options) == 2
    assert "--method names no configuration of drafts, to whose acceptance it applies" in capsys.readouterr().err


def test_no_speculation_may_be_asked_for(folder, tmp_path, capsys):
    assert run(folder, *SLA, *LOAD, "--method", "plain", "--json") in (0, 1)
    assert json.loads(capsys.readouterr().out)["speculative_config"] is None
    replace(fake_profile(), has_plain_steps=False).save(tmp_path)
    assert run(tmp_path, *SLA, *LOAD, "--method", "plain") == 2
    assert "nothing is known of steps without drafts" in capsys.readouterr().err


def test_a_configuration_that_is_known_by_its_model_alone_is_shown_by_it(tmp_path, capsys):
    profile = fake_profile()
    head = {"model": "some/eagle3-head", "num_speculative_tokens": 3}
    replace(profile, configs=profile.configs | {"head": head}).save(tmp_path)
    assert run(tmp_path, "--sla", "ttft=2s,itl=50ms", "--load", "rate=2,isl=100,osl=60", "--method", "head") == 0
    assert "some/eagle3-head, K = " in capsys.readouterr().out


@pytest.mark.parametrize("length", [10**400, 5000])
def test_a_length_of_a_day_that_no_float_has_is_refused(folder, length, tmp_path, capsys):
    lines = [{"timestamp": 60_000 * at, "input_length": length, "output_length": 2} for at in range(9)]
    (tmp_path / "day.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert run(folder, *SLA, "--replay", tmp_path / "day.jsonl") == 2
    assert "together more than max_model_len (4096)" in capsys.readouterr().err


def test_handing_over_takes_its_time_where_engines_may_be_apart(folder, capsys):
    def time_per_token(*options):
        assert run(folder, *SLA, *LOAD, "--layout", "disaggregated", "--json", *options) == 0
        return json.loads(capsys.readouterr().out)["predicted"]["tpot_mean_ms"]

    assert time_per_token("--transfer-seconds", 0.1) > time_per_token() + 1.0


def test_a_folder_without_a_profile_is_refused(tmp_path, capsys):
    assert run(tmp_path, *SLA, *LOAD) == 2
    assert "make one with forerun profile" in capsys.readouterr().err
