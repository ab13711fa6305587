"""Computes the figures of a load test: throughput, latencies and goodput as vLLM defines them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from forerun.bench.load.answer import METRICS, Answer
from forerun.core.load_figures import Figures, Peaks, Spread


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
