"""A day of traffic under one way to decide: what was planned, what it cost, who attained the SLA, and what the simulator says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedInterval:
    """What one interval was planned for, and what came of it by the formulas."""

    start: float
    predicted_rate: float  # requests per second; of an oracle the real one
    rate: float
    engines: int  # of both kinds
    prefill_engines: int  # of these; 0: each serves whole requests
    attained: float  # requests of the interval that attain the SLA
    num_requests: int
    backlog: float  # requests that wait at its end


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedDay:
    """What came of a day in the simulator, where engines start and drain when that was decided."""

    seed: int
    engine_seconds: float  # engines that are given up count until they have drained
    attained: tuple[int, ...]  # requests of each interval that attain the SLA, by their arrival
    num_requests: tuple[int, ...]
    num_preemptions: int

    @property
    def engine_hours(self) -> float:
        """What the day costs."""
        return self.engine_seconds / SECONDS_PER_HOUR

    @property
    def attainment(self) -> float:
        """The share of the day's requests that attain the SLA."""
        return _attainment(zip(self.attained, self.num_requests, strict=True))

    @property
    def worst(self) -> float:
        """The same of the worst interval."""
        return _worst(zip(self.attained, self.num_requests, strict=True))

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        return {
            "seed": self.seed,
            "engine_hours": self.engine_hours,
            "attainment": self.attainment,
            "worst_interval_attainment": self.worst,
            "num_preemptions": self.num_preemptions,
            "attained": list(self.attained),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DayPlan:
    """A day under one way to decide. `simulated` is None where only the formulas were asked."""

    name: str
    interval: float  # seconds
    intervals: tuple[PlannedInterval, ...]
    simulated: SimulatedDay | None = None

    @property
    def seconds(self) -> float:
        """From the beginning of the first interval to the end of the last."""
        return len(self.intervals) * self.interval

    @property
    def engine_hours(self) -> float:
        """What the day costs."""
        return sum(one.engines for one in self.intervals) * self.interval / SECONDS_PER_HOUR

    @property
    def attainment(self) -> float:
        """The share of the day's requests that attain the SLA, by the formulas."""
        return _attainment((one.attained, one.num_requests) for one in self.intervals)

    @property
    def worst(self) -> float:
        """The same of the worst interval."""
        return _worst((one.attained, one.num_requests) for one in self.intervals)

    @property
    def num_changes(self) -> int:
        """How often engines were started or stopped."""
        return sum(now.engines != before.engines for before, now in pairwise(self.intervals))

    @property
    def rate_error(self) -> float:
        """Mean absolute error of the predicted rate, as a share of the mean rate."""
        errors = sum(abs(one.predicted_rate - one.rate) for one in self.intervals)
        total = sum(one.rate for one in self.intervals)
        return errors / total if total else 0.0

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        return {
            "name": self.name,
            "engine_hours": self.engine_hours,
            "attainment": self.attainment,
            "worst_interval_attainment": self.worst,
            "num_changes": self.num_changes,
            "rate_error": self.rate_error,
            "simulated": None if self.simulated is None else self.simulated.to_json(),
            "intervals": [asdict(one) for one in self.intervals],
        }


def _attainment(intervals: Iterable[tuple[float, int]]) -> float:
    """The share of (attained, all) requests of intervals; 1 where there were none."""
    attained, totals = zip(*intervals, strict=True)
    total = sum(totals)
    return sum(attained) / total if total else 1.0


def _worst(intervals: Iterable[tuple[float, int]]) -> float:
    return min((attained / count for attained, count in intervals if count), default=1.0)
