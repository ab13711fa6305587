"""Results have the original's keys, and its acceptance rate as a ratio of sums."""

from __future__ import annotations

import pytest

from benchmarks.experiment.results import Batch, Measured, Request, percentile

RUN = [
    "method",
    "total_requests",
    "total_batches",
    "total_duration",
    "total_tokens",
    "total_prompt_tokens",
    "overall_throughput",
    "avg_ttft",
    "avg_latency",
    "avg_acceptance_rate",
    "batches",
]
BATCH = ["batch_size", "batch_latency", "total_tokens", "avg_ttft", "avg_latency", "throughput", "requests"]
REQUEST = [
    "prompt_tokens",
    "generated_tokens",
    "total_tokens",
    "ttft",
    "total_latency",
    "acceptance_rate",
    "drafts_generated",
    "drafts_accepted",
]


def request(generated, ttft, latency, drafted=0, accepted=0):
    return Request(
        prompt_tokens=10,
        generated_tokens=generated,
        ttft=ttft,
        total_latency=latency,
        drafted=drafted,
        accepted=accepted,
    )


def measured():
    return Measured(
        batches=[
            Batch(requests=[request(5, 0.5, 1.5, 10, 1), request(3, 0.5, 2.0, 2, 2)], seconds=2.0, late=0.0),
            Batch(requests=[request(4, 1.0, 4.0)], seconds=4.0, late=0.5),
        ],
        seconds=12.0,
    )


def test_the_keys_of_the_original_come_first_and_whole():
    result = measured().to_json("speculative")
    assert list(result)[: len(RUN)] == RUN
    assert list(result["batches"][0])[: len(BATCH)] == BATCH
    assert list(result["batches"][0]["requests"][0]) == REQUEST


def test_figures_are_sums_and_means():
    result = measured().to_json("speculative")
    assert (result["total_requests"], result["total_batches"], result["total_tokens"]) == (3, 2, 12)
    assert result["overall_throughput"] == 1.0
    assert result["busy_throughput"] == 2.0
    assert result["avg_latency"] == 2.5
    assert result["avg_tpot"] == pytest.approx((1.0 + 1.5 + 3.0) / 9)
    assert result["batches"][0]["throughput"] == 4.0
    assert result["batches"][0]["requests"][0]["total_tokens"] == 15


def test_acceptance_is_a_ratio_of_sums_and_null_without_drafts():
    result = measured().to_json("speculative")
    assert result["avg_acceptance_rate"] == 3 / 12
    assert result["batches"][1]["requests"][0]["acceptance_rate"] is None


def test_percentiles_are_values_that_were_measured():
    assert [percentile([4, 1, 3, 2], percent) for percent in (0, 50, 75, 99)] == [1, 2, 3, 4]
