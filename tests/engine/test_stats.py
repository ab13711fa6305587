"""Metrics with vLLM's names, the log line in its words."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from forerun.core.draft import Draft
from forerun.core.stats import ExecutorInfo, SpeculationStats, StepTimes
from forerun.engine import stats as stats_module
from forerun.engine.regret import ChoiceAccount, SpeculationReport
from forerun.engine.stats import (
    Counter,
    EngineState,
    EngineStats,
    Gauge,
    StatsLog,
    Vector,
    drafters_line,
    executor_line,
    report_line,
    speculation_line,
)

STATE = EngineState(
    num_running=2, num_waiting=3, kv_usage=0.25, num_preemptions=4, num_queried_tokens=200, num_cached_tokens=50
)


class Clock:
    """A clock that goes when it is set."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def three_steps():
    """Drafts of four tokens: all accepted, one accepted, and no draft at all."""
    stats = SpeculationStats()
    stats.record(Draft((1, 2, 3, 4)), (0, 1, 2, 3))
    stats.record(Draft((1, 2, 3, 4)), (0,))
    stats.record(Draft(), ())
    return stats


def test_the_speculation_line_is_vllms():
    assert speculation_line(three_steps(), 2.0) == (
        "SpecDecoding metrics: Mean acceptance length: 3.50, Accepted throughput: 2.50 tokens/s, "
        "Drafted throughput: 4.00 tokens/s, Accepted: 5 tokens, Drafted: 8 tokens, "
        "Per-position acceptance rate: 1.000, 0.500, 0.500, 0.500, Avg Draft acceptance rate: 62.5%"
    )


def test_a_line_tells_what_each_drafter_has_cost_and_earned():
    stats = SpeculationStats()
    for source, accepted in (("suffix", (0, 1)), ("recycle", (0,)), ("suffix", ())):
        stats.record(Draft((1, 2, 3), source=source), accepted)
    stats.record(Draft(), ())
    assert drafters_line(stats) == (
        "Drafters: recycle 0.75 rows and +0.25 tokens per step (1 of 3 tokens in 1 drafts), "
        "suffix 1.50 rows and +0.50 tokens per step (2 of 6 tokens in 2 drafts)"
    )


def test_a_drafter_that_did_nothing_since_the_last_line_is_not_in_it():
    stats = SpeculationStats()
    stats.record(Draft((1,), source="suffix"), ())
    earlier = stats.copy()
    stats.record(Draft((1,), source="recycle"), (0,))
    assert drafters_line(stats.since(earlier)) == (
        "Drafters: recycle 1.00 rows and +1.00 tokens per step (1 of 1 tokens in 1 drafts)"
    )


REPORT = SpeculationReport(tokens_per_second=150.0, plain_tokens_per_second=100.0, best_static_length=3, regret=0.015)


def chosen(num_steps, *, seconds):
    """An account of steps of two tokens, of which one was drafted, verified and stood."""
    account = ChoiceAccount()
    for _ in range(num_steps):
        account.note_step(2, seconds, plain=0.01)
        account.note_choice([[1.0]], [1], cost_with=lambda num_drafted: 1.0 + 0.5 * num_drafted, drafting=0.0)
        account.note_fate([1.0], [0])
    return account


def test_what_was_chosen_is_in_the_metrics_and_since_the_last_line_in_the_log(clock, caplog):
    caplog.set_level(logging.INFO, logger=stats_module.__name__)
    log, account = StatsLog(clock), chosen(10, seconds=0.01)
    clock.now += 10
    log.write(EngineStats(), replace(STATE, choices=account.copy()))
    for _ in range(10):
        account.note_step(1, 0.02, plain=0.01)
        account.note_choice([[1.0]], [1], cost_with=lambda num_drafted: 1.0 + 0.5 * num_drafted, drafting=0.0)
        account.note_fate([1.0], [])
    clock.now += 10
    state = replace(STATE, choices=account.copy())
    log.write(EngineStats(), state)
    clock.now += 10
    log.write(EngineStats(), state)
    assert [message for record in caplog.records if "Regret" in (message := record.getMessage())] == [
        "Estimated generation throughput: 200.0 tokens/s with drafts, 100.0 tokens/s without (2.00x), "
        "Regret against 1 draft tokens in every step: 0.0%",
        "Estimated generation throughput: 50.0 tokens/s with drafts, 100.0 tokens/s without (0.50x), "
        "Regret against 0 draft tokens in every step: 3.8%",
    ]
    values = {metric.name: metric.value for metric in EngineStats().metrics(state) if isinstance(metric, Gauge)}
    assert values["forerun:spec_decode_tokens_per_second"] == pytest.approx(100.0)
    assert values["forerun:spec_decode_plain_tokens_per_second"] == pytest.approx(100.0)
    assert values["forerun:spec_decode_regret"] == 0.0
    assert values["forerun:spec_decode_best_static_length"] == 1


EXECUTOR = ExecutorInfo("device", "NVIDIA H200", "triton")


def test_the_log_and_the_metrics_say_what_computes_and_how_long_it_had_nothing_to_do(clock, caplog):
    caplog.set_level(logging.INFO, logger=stats_module.__name__)
    log, state, stats = StatsLog(clock), replace(STATE, executor=EXECUTOR), EngineStats()
    stats.times.add(StepTimes(idle=0.004, num_steps=100))
    clock.now += 10
    log.write(stats, state)
    stats.times.add(StepTimes(idle=0.001, num_steps=100))
    clock.now += 10
    log.write(stats, state)
    assert [record.getMessage() for record in caplog.records][1::2] == [
        "Executor: device on NVIDIA H200 (triton), Device idle: 0.040 ms per step",
        "Executor: device on NVIDIA H200 (triton), Device idle: 0.010 ms per step",
    ]
    metrics = {metric.name: metric for metric in stats.metrics(state)}
    labels = {"executor": "device", "device": "NVIDIA H200", "kernels": "triton"}
    assert metrics["forerun:executor_info"] == Gauge("forerun:executor_info", 1, labels)
    assert metrics["forerun:device_idle_seconds"].value == pytest.approx(0.005)
    assert metrics["forerun:num_steps"] == Counter("forerun:num_steps", 200)


def test_idle_time_that_nobody_measures_is_not_told():
    assert executor_line(EXECUTOR, StepTimes(num_steps=100)) == "Executor: device on NVIDIA H200 (triton)"


def test_what_is_not_reported_is_not_told(clock, caplog):
    caplog.set_level(logging.INFO, logger=stats_module.__name__)
    log = StatsLog(clock)
    clock.now += 10
    log.write(EngineStats(), STATE)
    assert len(caplog.records) == 1
    assert not [metric for metric in EngineStats().metrics(STATE) if "per_second" in metric.name]


def test_no_speed_up_is_told_of_nothing():
    assert report_line(replace(REPORT, plain_tokens_per_second=0.0, regret=0.0)) == (
        "Estimated generation throughput: 150.0 tokens/s with drafts, 0.0 tokens/s without, "
        "Regret against 3 draft tokens in every step: 0.0%"
    )


def test_a_line_is_due_every_ten_seconds(clock):
    log = StatsLog(clock)
    clock.now += 9.9
    assert not log.is_due
    clock.now += 0.2
    assert log.is_due
    log.write(EngineStats(), STATE)
    assert not log.is_due


def test_the_log_tells_what_happened_since_the_last_line(clock, caplog):
    caplog.set_level(logging.INFO, logger=stats_module.__name__)
    log, stats = (
        StatsLog(clock),
        EngineStats(num_prompt_tokens=400, num_generation_tokens=100, speculation=three_steps()),
    )
    clock.now += 10
    log.write(stats, STATE)
    clock.now += 20
    stats.num_generation_tokens += 100
    log.write(stats, STATE)
    first, speculation, second = (record.getMessage() for record in caplog.records)
    assert first == (
        "Avg prompt throughput: 40.0 tokens/s, Avg generation throughput: 10.0 tokens/s, Running: 2 reqs, "
        "Waiting: 3 reqs, KV cache usage: 25.0%, Prefix cache hit rate: 25.0%"
    )
    assert speculation.startswith("SpecDecoding metrics: Mean acceptance length: 3.50")
    assert second.startswith("Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 5.0 tokens/s")


def test_steps_by_graphs_are_counted_and_told_where_there_are_any():
    times = StepTimes(num_steps=4, num_replayed_steps=3)
    assert executor_line(EXECUTOR, times).endswith("(triton), CUDA graphs: 3 of 4 steps")
    stats = EngineStats(times=times)
    found = {metric.name: metric.value for metric in stats.metrics(STATE) if hasattr(metric, "value")}
    assert (found["forerun:graph_steps"], found["forerun:eager_steps"]) == (3, 1)


def test_metrics_bear_vllms_names():
    stats = EngineStats(num_prompt_tokens=7, speculation=three_steps(), num_finished={"stop": 1})
    metrics = {metric.name: metric for metric in stats.metrics(STATE)}
    assert metrics["vllm:num_requests_running"] == Gauge("vllm:num_requests_running", 2)
    assert metrics["vllm:num_requests_waiting"].value == 3
    assert metrics["vllm:kv_cache_usage_perc"].value == 0.25
    assert metrics["vllm:num_preemptions"].value == 4
    assert metrics["vllm:prompt_tokens"] == Counter("vllm:prompt_tokens", 7)
    assert metrics["vllm:request_success"] == Counter("vllm:request_success", 1, {"finished_reason": "stop"})
    assert metrics["vllm:spec_decode_num_drafts"].value == 2
    assert metrics["vllm:spec_decode_num_draft_tokens"].value == 8
    assert metrics["vllm:spec_decode_num_accepted_tokens"].value == 5
    per_position = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert per_position == Vector("vllm:spec_decode_num_accepted_tokens_per_pos", [2, 1, 1, 1])


def test_positions_that_no_draft_has_reached_count_zero():
    state = EngineState(num_running=0, num_waiting=0, kv_usage=0.0, num_speculative_tokens=6)
    metrics = {metric.name: metric for metric in EngineStats(speculation=three_steps()).metrics(state)}
    assert metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values == [2, 1, 1, 1, 0, 0]
    assert metrics["forerun:spec_decode_num_reached_per_pos"].values == [2, 2, 1, 1, 0, 0]
