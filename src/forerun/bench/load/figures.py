"""Computes the figures of a load test: throughput, latencies and goodput as vLLM defines them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from forerun.bench.load.answer import METRICS, Answer


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, median, standard deviation and percentiles of a latency, in milliseconds, or None without values."""

    mean: float | None
    median: float | None
    std: float | None
    percentiles: dict[float, float | None]

    @classmethod
    def of(cls, seconds: Sequence[float], percents: Sequence[float]) -> Spread:
        """The spread of values in seconds."""
        if not seconds:
            return cls(None, None, None, dict.fromkeys(percents))
        values = 1e3 * np.asarray(seconds)
        return cls(
            float(values.mean()),
            float(np.median(values)),
            float(values.std()),
            {percent: float(np.percentile(values, percent)) for percent in percents},
        )

    def to_json(self, name: str) -> dict[str, float | None]:
        """vLLM's keys for the metric `name`."""
        shown = {"mean": self.mean, "median": self.median, "std": self.std}
        shown |= {f"p{percent:g}": value for percent, value in self.percentiles.items()}
        return {f"{key}_{name}_ms": value for key, value in shown.items()}


@dataclass(frozen=True, slots=True)
class Peaks:
    """The largest count within one second of a run, of each kind."""

    num_chunks: float  # vLLM's "peak output token throughput"
    num_tokens: float
    num_requests: int  # that ran within one second


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The counts, throughputs and latencies of a run."""

    seconds: float
    completed: int
    failed: int
    total_input: int
    total_output: int
    num_good: int | None  # requests that met all goals, or None without goals
    peaks: Peaks
    spreads: dict[str, Spread]

    @property
    def request_throughput(self) -> float:
        """Answered requests per second."""
        return self.completed / self.seconds

    @property
    def request_goodput(self) -> float | None:
        """Requests per second that met all goals, or None without goals."""
        return None if self.num_good is None else self.num_good / self.seconds

    @property
    def output_throughput(self) -> float:
        """Output tokens per second."""
        return self.total_output / self.seconds

    @property
    def total_token_throughput(self) -> float:
        """Prompt and output tokens per second."""
        return (self.total_input + self.total_output) / self.seconds

    def to_json(self) -> dict[str, Any]:
        """vLLM's keys, and `peak_output_token_throughput`, which vLLM lacks."""
        spreads = {key: value for name, spread in self.spreads.items() for key, value in spread.to_json(name).items()}
        return {
            "duration": self.seconds,
            "completed": self.completed,
            "failed": self.failed,
            "total_input_tokens": self.total_input,
            "total_output_tokens": self.total_output,
            "request_throughput": self.request_throughput,
            "request_goodput": self.request_goodput,
            "output_throughput": self.output_throughput,
            "total_token_throughput": self.total_token_throughput,
            "max_output_tokens_per_s": self.peaks.num_chunks,
            "max_concurrent_requests": self.peaks.num_requests,
            "peak_output_token_throughput": self.peaks.num_tokens,
            **spreads,
        }


def sum_up(
    answers: Sequence[Answer],
    seconds: float,
    *,
    metrics: Sequence[str],
    percents: Sequence[float],
    goals: Mapping[str, float],
) -> Figures:
    """Compute the figures of a run; failed requests count only as failed.

    Args:
        answers: one per request, with token counts.
        seconds: from the first request to the last answer.
        metrics: latencies to report, names of `METRICS`.
        percents: percentiles to report.
        goals: milliseconds by name of `GOODPUT_METRICS`; empty for no goodput.
    """
    good = [answer for answer in answers if answer.error is None]
    return Figures(
        seconds=seconds,
        completed=len(good),
        failed=len(answers) - len(good),
        total_input=sum(answer.num_prompt_tokens or 0 for answer in good),
        total_output=sum(answer.num_output_tokens or 0 for answer in good),
        num_good=sum(_meets(answer, goals) for answer in good) if goals else None,
        peaks=find_peaks(good),
        spreads={
            name: Spread.of([value for answer in good for value in METRICS[name].values(answer)], percents)
            for name in metrics
        },
    )


def find_peaks(answers: Sequence[Answer]) -> Peaks:
    """The largest counts of any second since the first request."""
    if not answers:
        return Peaks(0.0, 0.0, 0)
    timeline = Timeline.of(answers)
    return Peaks(float(timeline.chunks.max()), float(timeline.tokens.max()), int(timeline.requests.max()))


class Timeline(NamedTuple):
    """Counts of each second of a run: chunks as vLLM counts them, tokens, and running requests."""

    chunks: np.ndarray[Any, np.dtype[np.float64]]
    tokens: np.ndarray[Any, np.dtype[np.float64]]
    requests: np.ndarray[Any, np.dtype[np.float64]]

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> Timeline:
        """Count by whole seconds since the first request was sent."""
        start = min(answer.started for answer in answers)
        end = max(answer.started + answer.latency for answer in answers)
        chunks, tokens, requests = np.zeros((3, math.ceil(end - start) + 1))
        for answer in answers:
            begin = answer.started - start
            seconds = begin + answer.ttft + np.cumsum([0.0, *answer.itls])
            np.add.at(chunks, seconds.astype(int), 1)
            for moment, count in answer.weighted_chunks:
                tokens[int(begin + moment)] += count
            requests[int(begin) : int(begin + answer.latency) + 1] += 1
        return cls(chunks, tokens, requests)


def _meets(answer: Answer, goals: Mapping[str, float]) -> bool:
    """Whether an answer meets all goals; one of a single token meets any goal of time per token."""
    return all(1e3 * sum(METRICS[name].values(answer)) <= most for name, most in goals.items())
