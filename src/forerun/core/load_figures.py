"""The figures of requests that were served: throughput, latencies and goodput, in the keys of `vllm bench serve`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


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
        if not len(seconds):
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
    num_tokens: float | None  # None: the tokens of an answer are not known
    num_requests: int  # that ran within one second


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The counts, throughputs and latencies of a run; None where the tokens of a prompt or an answer are not known."""

    seconds: float
    completed: int
    failed: int
    total_input: int | None
    total_output: int | None
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
    def output_throughput(self) -> float | None:
        """Output tokens per second."""
        return None if self.total_output is None else self.total_output / self.seconds

    @property
    def total_tokens(self) -> int | None:
        """Prompt and output tokens."""
        return None if self.total_input is None or self.total_output is None else self.total_input + self.total_output

    @property
    def total_token_throughput(self) -> float | None:
        """Prompt and output tokens per second."""
        return None if self.total_tokens is None else self.total_tokens / self.seconds

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
