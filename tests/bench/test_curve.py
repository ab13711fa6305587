"""The figures of a curve, on fake clocks, and the costs of drafting, on one short generation."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from forerun import LLM
from forerun.bench import instruments
from forerun.bench.curve import NUM_WARMUP_ROUNDS, keep_costs, measure_curve, measure_drafting
from forerun.bench.instruments import NUM_READS, BandwidthProbe, Interrupted, Stopwatch
from forerun.engine.costs import PRIOR
from forerun.errors import ConfigError
from forerun.ops.native.library import load_kernels
from tests.bench.clocks import SlowingClock, TickingClock
from tests.bench.interruptions import interrupt
from tests.engines import tiny_llm, tiny_target

SMALL = {"rows": (4,), "contexts": (16, 32), "sequences": (2,), "repeats": 3}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch):
    monkeypatch.setitem(instruments.BUFFER_BYTES, "cpu", 1 << 16)


@pytest.fixture
def curve(llm):
    return measure_curve(llm, **SMALL, clock=TickingClock())


def test_each_context_has_one_row_then_rows_and_sequences(curve):
    shapes = [(point.context, point.num_sequences, point.rows) for point in curve.points]
    assert shapes == [(16, 1, 1), (16, 1, 4), (16, 2, 1), (32, 1, 1), (32, 1, 4), (32, 2, 1)]


def test_a_point_has_the_time_of_every_round(curve):
    assert all(point.all_milliseconds == [1000.0] * 3 for point in curve.points)


def test_share_is_the_time_the_memory_needs_over_the_time_taken(curve):
    # A read of the buffer takes as long as each pass.
    assert [point.bandwidth_share for point in curve.points] == [point.num_bytes / (1 << 16) for point in curve.points]


def test_bytes_are_the_weights_and_the_context_of_each_sequence(curve):
    one, four_rows, two = (point.num_bytes - curve.weight_bytes for point in curve.points[:3])
    assert (four_rows, two) == (one, 2 * one)


def test_a_machine_that_gets_slower_changes_neither_ratios_nor_shares(llm, curve):
    looks = 2 * (NUM_READS + len(curve.points))
    slowing = measure_curve(llm, **SMALL, clock=SlowingClock(looks))
    steady = [(point.ratio, point.bandwidth_share) for point in curve.points]
    assert [(point.ratio, point.bandwidth_share) for point in slowing.points] == steady


def test_rounds_before_the_machine_is_warm_do_not_count(llm, curve):
    looks = 2 * (NUM_READS + len(curve.points))
    slowing = measure_curve(llm, **SMALL, clock=SlowingClock(looks))
    assert slowing.points[0].all_milliseconds == [
        1000.0 * 2**k for k in range(NUM_WARMUP_ROUNDS, NUM_WARMUP_ROUNDS + 3)
    ]


def test_json_holds_every_point(curve):
    report = json.loads(json.dumps(curve.to_json()))
    assert len(report["points"]) == len(curve.points)
    assert report["dtype"] == "float32"


@pytest.mark.parametrize("name", ["rows", "contexts", "sequences"])
def test_a_number_below_one_is_refused(llm, name):
    with pytest.raises(ConfigError, match=f"{name}: got 0; must be 1 or more"):
        measure_curve(llm, **{**SMALL, name: (4, 0)})


def test_the_next_engine_begins_with_the_costs_of_the_curve(llm, curve, monkeypatch, tmp_path):
    profile = replace(llm.cost_profile, folder=tmp_path)
    monkeypatch.setattr(LLM, "cost_profile", profile)
    dear = [replace(point, all_milliseconds=[5.0 * point.rows] * 9) for point in curve.points]
    keep_costs(llm, replace(curve, points=dear))
    costs = profile.load()
    assert costs.weights != PRIOR
    assert costs.of_rows(4) > 1.5 * costs.of_rows(1)


def test_no_context_is_refused(llm):
    with pytest.raises(ConfigError, match="contexts: got none"):
        measure_curve(llm, **{**SMALL, "contexts": ()})


@pytest.mark.skipif(load_kernels() is None, reason="the kernels are not built")
def test_int8_weights_are_fewer_bytes(folder, curve):
    llm = LLM(folder, load_format="dummy", quantization="int8", max_model_len=256, num_gpu_blocks_override=64)
    assert measure_curve(llm, **SMALL, clock=TickingClock()).weight_bytes < 0.3 * curve.weight_bytes


def test_where_rows_choose_experts_no_bytes_are_those_that_every_pass_reads():
    curve = measure_curve(tiny_llm(target=tiny_target("MixtralForCausalLM")), **SMALL, clock=TickingClock())
    assert curve.weight_bytes is None
    assert {point.bandwidth_share for point in curve.points} == {None}


def test_a_drafter_that_looks_back_finds_drafts(llm):
    cost = measure_drafting(llm.with_speculation(NGRAM), 1.0, num_tokens=24)
    assert cost.num_draft_tokens > 0
    assert cost.milliseconds_per_draft_token is not None


@pytest.mark.parametrize(
    "config",
    [
        {"method": "draft_model", "model": "tiny", "num_speculative_tokens": 3},
        {"method": "self", "exit_layer": 1, "num_speculative_tokens": 3},
    ],
    ids=lambda config: config["method"],
)
def test_a_drafter_with_a_model_is_charged_for_each_token_of_each_step(config):
    cost = measure_drafting(tiny_llm(config, max_model_len=192), 2.0, num_tokens=24)
    assert cost.num_draft_tokens > 2 * cost.num_steps  # three but near the end
    assert cost.draft_milliseconds_per_step == pytest.approx(
        cost.milliseconds_per_draft_token * cost.num_draft_tokens / cost.num_steps
    )
    assert cost.draft_token_share == pytest.approx(cost.milliseconds_per_draft_token / 2)


def test_the_step_of_the_prompt_is_not_counted(llm):
    assert measure_drafting(llm.with_speculation(None), 1.0, num_tokens=24).num_steps == 23


def test_without_drafts_there_is_no_time_per_drafted_token(llm):
    assert measure_drafting(llm.with_speculation(None), 1.0, num_tokens=8).milliseconds_per_draft_token is None


def test_ctrl_c_leaves_whole_rounds(llm, curve, monkeypatch):
    num_looks = (NUM_WARMUP_ROUNDS + 2) * (NUM_READS + len(curve.points))
    interrupt(monkeypatch, Stopwatch, "seconds", at=num_looks + NUM_READS + 2)  # in the third round
    with pytest.raises(Interrupted, match="2 of 3 rounds") as caught:
        measure_curve(llm, **SMALL, clock=TickingClock())
    found = caught.value.found
    assert (found.repeats, len(found.all_gigabytes_per_second)) == (2, 2)
    assert all(point.all_milliseconds == [1000.0] * 2 for point in found.points)


def test_ctrl_c_before_a_whole_round_leaves_nothing(llm, monkeypatch):
    interrupt(monkeypatch, BandwidthProbe, "measure", at=NUM_WARMUP_ROUNDS + 1)
    with pytest.raises(KeyboardInterrupt) as caught:
        measure_curve(llm, **SMALL)
    assert not isinstance(caught.value, Interrupted)
