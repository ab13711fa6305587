"""Computes the figures of a load test: throughput, latencies and goodput as vLLM defines them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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
        answers: one per request, with token counts as far as these are known.
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
        total_input=_sum_known(answer.num_prompt_tokens for answer in good),
        total_output=_sum_known(answer.num_output_tokens for answer in good),
        num_good=_count_good(good, goals),
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
    tokens = None if timeline.tokens is None else float(timeline.tokens.max())
    return Peaks(float(timeline.chunks.max()), tokens, int(timeline.requests.max()))


class Timeline(NamedTuple):
    """Counts of each second of a run: chunks as vLLM counts them, tokens (None: not all are known), and running requests."""

    chunks: np.ndarray[Any, np.dtype[np.float64]]
    tokens: np.ndarray[Any, np.dtype[np.float64]] | None
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
                tokens[int(begin + moment)] += count or 0.0
            requests[int(begin) : int(begin + answer.latency) + 1] += 1
        is_known = all(answer.num_output_tokens is not None for answer in answers)
        return cls(chunks, tokens if is_known else None, requests)


def _sum_known(counts: Iterable[int | None]) -> int | None:
    """The sum; None where one of them is not known."""
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total


def _count_good(answers: Sequence[Answer], goals: Mapping[str, float]) -> int | None:
    """How many answers meet all goals; None without goals, or where a time per token is not known."""
    if not goals or ("tpot" in goals and any(answer.num_output_tokens is None for answer in answers)):
        return None
    return sum(_meets(answer, goals) for answer in answers)


def _meets(answer: Answer, goals: Mapping[str, float]) -> bool:
    """Whether an answer meets all goals; one of a single token meets any goal of time per token."""
    return all(1e3 * sum(METRICS[name].values(answer)) <= most for name, most in goals.items())
