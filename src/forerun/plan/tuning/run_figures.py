"""What one run of a configuration gave, simulated or real, from the times of its requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from forerun.plan.sla import LATENCIES, Sla

KEPT = (
    *("num_requests", "num_output_tokens", "seconds", "attainment", "joules", "acceptance_length", "num_differing"),
)
"""The fields of `RunFigures` that JSON holds as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """One request: seconds from its arrival to its first and to its last token, and what it was sent."""

    ttft: float
    e2el: float
    num_tokens: int
    num_chunks: int  # messages of its stream: with speculation one holds several tokens

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 for an answer of one token, which meets any limit and is left out of means."""
        return (self.e2el - self.ttft) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0

    @property
    def icl(self) -> float:
        """Mean seconds between two messages; 0 if there was one, likewise."""
        return (self.e2el - self.ttft) / (self.num_chunks - 1) if self.num_chunks > 1 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Mean and percentiles over requests, in seconds."""

    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """The spread of one value or more."""
        p50, p95, p99 = (float(value) for value in np.percentile(seconds, (50, 95, 99)))
        return cls(mean=float(np.mean(seconds)), p50=p50, p95=p95, p99=p99)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """Throughput, latencies and energy of one run.

    `attainment` is the share of requests that kept all goals, None without goals. `joules` is what the machine
    used, None where nothing counts it. `acceptance_length` is tokens per step of a sequence. `num_differing` counts
    answers that are not the recorded ones.
    """

    num_requests: int
    num_output_tokens: int
    seconds: float  # from the start, before the first arrival, to the last token
    ttft: Spread
    tpot: Spread
    icl: Spread
    e2el: Spread
    attainment: float | None = None
    joules: float | None = None
    acceptance_length: float | None = None
    num_differing: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second."""
        return self.num_output_tokens / self.seconds

    @property
    def goodput(self) -> float | None:
        """Requests per second that kept all goals; None without goals."""
        return None if self.attainment is None else self.attainment * self.num_requests / self.seconds

    @property
    def joules_per_token(self) -> float | None:
        """Energy per output token; None where it is not counted."""
        return None if self.joules is None else self.joules / self.num_output_tokens

    @classmethod
    def of(
        cls,
        requests: Sequence[RequestTimes],
        seconds: float,
        *,
        sla: Sla | None = None,
        joules: float | None = None,
        acceptance_length: float | None = None,
        num_differing: int = 0,
    ) -> RunFigures:
        """The figures of a run of one request or more that took so many seconds."""
        met = [sla.is_met(ttft=one.ttft, tpot=one.tpot, icl=one.icl, e2el=one.e2el) for one in requests] if sla else []
        return cls(
            num_requests=len(requests),
            num_output_tokens=sum(one.num_tokens for one in requests),
            seconds=seconds,
            ttft=Spread.of([one.ttft for one in requests]),
            tpot=Spread.of([one.tpot for one in requests if one.num_tokens > 1] or [0.0]),
            icl=Spread.of([one.icl for one in requests if one.num_chunks > 1] or [0.0]),
            e2el=Spread.of([one.e2el for one in requests]),
            attainment=sum(met) / len(met) if met else None,
            joules=joules,
            acceptance_length=acceptance_length,
            num_differing=num_differing,
        )

    def to_json(self) -> dict[str, Any]:
        """The record as `from_json` reads it, latencies in milliseconds, with the rates that follow from it."""
        figures: dict[str, Any] = {name: getattr(self, name) for name in KEPT}
        for name in LATENCIES:
            spread: Spread = getattr(self, name)
            figures |= {f"{field.name}_{name}_ms": 1e3 * getattr(spread, field.name) for field in fields(Spread)}
        rates = {"tokens_per_second": self.tokens_per_second, "goodput": self.goodput}
        return figures | rates | {"joules_per_token": self.joules_per_token}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> RunFigures:
        """The figures of a record that `to_json` made.

        Raises:
            KeyError: a key is missing.
        """
        spreads: dict[str, Any] = {
            name: Spread(**{field.name: record[f"{field.name}_{name}_ms"] / 1e3 for field in fields(Spread)})
            for name in LATENCIES
        }
        kept: dict[str, Any] = {name: record[name] for name in KEPT}
        return cls(**kept, **spreads)
