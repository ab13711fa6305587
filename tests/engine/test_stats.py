"""Metrics with vLLM's names, the log line in its words."""

from __future__ import annotations

import logging

import pytest

from forerun.core.draft import Draft
from forerun.core.stats import SpeculationStats
from forerun.engine import stats as stats_module
from forerun.engine.stats import (
    Counter,
    EngineState,
    EngineStats,
    Gauge,
    StatsLog,
    Vector,
    drafters_line,
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


def test_where_drafters_take_turns_a_line_tells_what_each_has_earned():
    stats = SpeculationStats()
    for source, accepted in (("suffix", (0, 1)), ("draft_model", (0,)), ("suffix", ())):
        stats.record(Draft((1, 2, 3), source=source), accepted)
    assert drafters_line(stats) == (
        "Accepted by drafter: draft_model 1 of 3 tokens in 1 drafts, suffix 2 of 6 tokens in 2 drafts"
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
