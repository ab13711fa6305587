"""A day of traffic, planned interval by interval as it would have been: engines, cost, and who attained the SLA.

Before each interval a predictor says what will come, from what came before; the planner says how many engines that
needs; then the interval's real load meets them. What an interval cannot serve waits and adds to the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from forerun.errors import ConfigError
from forerun.plan.capacity import Routing
from forerun.plan.fleet_plan import KEEP_BELOW, MOST_REPLICAS, FleetPlan, FleetSearch, kept_engines
from forerun.plan.load import Load
from forerun.plan.predictors import HarmonicPredictor, Predictor, make_predictor
from forerun.plan.serving_policies import EngineModel, ServingPolicy
from forerun.plan.simulation.fleet import Transfer
from forerun.plan.simulation.requests import SimulatedRequest
from forerun.plan.sla import Sla

DEFAULT_INTERVAL = 180.0
"""Seconds from one decision to the next, as in Dynamo's planner."""

SECONDS_PER_HOUR = 3600.0
ORACLE, PEAK, MEAN = "oracle", "fixed: peak", "fixed: mean"
"""Plans to compare with: by the load that comes, and fixed counts for the most and the mean that any interval needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """What arrived in one interval; `load` is None where nothing did."""

    start: float  # seconds
    num_requests: int
    load: Load | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedInterval:
    """What one interval was planned for, and what came of it."""

    start: float
    predicted_rate: float  # requests per second; of an oracle the real one
    rate: float
    engines: int
    attained: float  # requests of the interval that attain the SLA
    num_requests: int
    backlog: float  # requests that wait at its end


@dataclass(frozen=True, slots=True, kw_only=True)
class DayPlan:
    """A day under one way to decide."""

    name: str
    interval: float  # seconds
    intervals: tuple[PlannedInterval, ...]

    @property
    def engine_hours(self) -> float:
        """What the day costs."""
        return sum(one.engines for one in self.intervals) * self.interval / SECONDS_PER_HOUR

    @property
    def attainment(self) -> float:
        """The share of the day's requests that attain the SLA."""
        total = sum(one.num_requests for one in self.intervals)
        return sum(one.attained for one in self.intervals) / total if total else 1.0

    @property
    def worst(self) -> float:
        """The same of the worst interval."""
        return min((one.attained / one.num_requests for one in self.intervals if one.num_requests), default=1.0)

    @property
    def num_changes(self) -> int:
        """How often engines were started or stopped."""
        counts = [one.engines for one in self.intervals]
        return sum(now != before for before, now in zip(counts, counts[1:], strict=False))

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
            "intervals": [asdict(one) for one in self.intervals],
        }


def intervals_of(requests: Sequence[SimulatedRequest], seconds: float = DEFAULT_INTERVAL) -> list[Interval]:
    """Count a trace's requests by interval.

    Raises:
        ConfigError: the interval is not above 0, or the trace is shorter than two of them.
    """
    if not 0.0 < seconds < math.inf:
        raise ConfigError(f"interval: got {seconds:g} s; must be above 0")
    last = requests[-1].arrival if requests else 0.0
    count = math.floor(last / seconds) + 1
    if count < 2:
        raise ConfigError(
            f"replay: the trace has {len(requests)} requests in {last:g} s; must be longer than one interval of "
            f"{seconds:g} s: give a longer trace, or a shorter --interval"
        )
    parts: list[list[SimulatedRequest]] = [[] for _ in range(count)]
    for request in requests:
        parts[math.floor(request.arrival / seconds)].append(request)
    return [
        Interval(start=number * seconds, num_requests=len(part), load=_load_of(part, seconds))
        for number, part in enumerate(parts)
    ]


def _load_of(requests: Sequence[SimulatedRequest], seconds: float) -> Load | None:
    if not requests:
        return None
    prompts = np.array([one.num_prompt_tokens for one in requests], dtype=np.float64)
    answers = np.array([one.num_output_tokens for one in requests], dtype=np.float64)
    gaps = np.diff([one.arrival for one in requests])
    has_gaps = len(gaps) >= 2 and float(gaps.mean()) > 0.0
    return Load(
        rate=len(requests) / seconds,
        isl=float(prompts.mean()),
        osl=float(answers.mean()),
        cv=float(gaps.std() / gaps.mean()) if has_gaps else 1.0,
        isl_cv=float(prompts.std() / prompts.mean()),
        osl_cv=float(answers.std() / answers.mean()),
    )


class LoadForecast:
    """Predicts the next interval's load: its rate and lengths by a predictor each, its unevenness as last seen."""

    def __init__(self, make: Callable[[], Predictor]) -> None:
        self._rate, self._isl, self._osl = make(), make(), make()
        self._last: Load | None = None

    def add(self, load: Load | None) -> None:
        """Note what an interval brought; an empty one says nothing of lengths."""
        self._rate.add(load.rate if load else 0.0)
        if load is not None:
            self._isl.add(load.isl)
            self._osl.add(load.osl)
            self._last = load

    def predict(self) -> Load | None:
        """The next interval's load; None: nothing will come, or nothing is known yet."""
        rate = self._rate.predict()
        if self._last is None or rate <= 0.0:
            return None
        last = self._last
        return Load(
            rate=rate,
            isl=max(1.0, self._isl.predict()),
            osl=max(1.0, self._osl.predict()),
            cv=last.cv,
            isl_cv=last.isl_cv,
            osl_cv=last.osl_cv,
            prefix_hit_rate=last.prefix_hit_rate,
        )


class DayReplay:
    """Plans a day with engines that are run in one way.

    Args:
        engine: what each engine is.
        policy: how each is run.
        sla: what must be attained.
        prefill_share: engines that compute prompts, as a share of all; 0: aggregated.
        most_engines: the budget; None: as many as it takes.
        transfer: what handing over a prompt's KV takes.
        routing: which engine a request is sent to.
    """

    def __init__(
        self,
        engine: EngineModel,
        policy: ServingPolicy,
        sla: Sla,
        *,
        prefill_share: float = 0.0,
        most_engines: int | None = None,
        transfer: Transfer,
        routing: Routing = Routing.LEAST_REQUESTS,
    ) -> None:
        self._routing = routing
        self._engine, self._policy, self._sla, self._transfer = engine, policy, sla, transfer
        self._prefill_share, self._most = prefill_share, most_engines or MOST_REPLICAS
        self._least = 2 if prefill_share else 1
        self._needed: dict[Load, int] = {}

    def run(
        self, name: str, intervals: Sequence[Interval], forecasts: Sequence[Load | None], *, steadily: bool = True
    ) -> DayPlan:
        """Plan each interval for its forecast; `steadily`: engines are given up only where the others stay unbusy."""
        counts: list[int] = []
        for forecast in forecasts:
            needed = self._least if forecast is None else self.engines_for(forecast)
            running = counts[-1] if counts and steadily else needed
            counts.append(self._kept(needed, running, forecast))
        return self.with_counts(name, intervals, counts, forecasts)

    def with_counts(
        self, name: str, intervals: Sequence[Interval], counts: Sequence[int], forecasts: Sequence[Load | None]
    ) -> DayPlan:
        """What comes of so many engines in each interval."""
        seconds = intervals[1].start - intervals[0].start
        backlog, planned = 0.0, []
        for interval, count, forecast in zip(intervals, counts, forecasts, strict=True):
            attained, backlog = self._meet(interval, count, backlog)
            planned.append(
                PlannedInterval(
                    start=interval.start,
                    predicted_rate=forecast.rate if forecast else 0.0,
                    rate=interval.load.rate if interval.load else 0.0,
                    engines=count,
                    attained=attained,
                    num_requests=interval.num_requests,
                    backlog=backlog,
                )
            )
        return DayPlan(name=name, interval=seconds, intervals=tuple(planned))

    def engines_for(self, load: Load) -> int:
        """The fewest engines that attain the SLA; where none do, those that are busy for 80 % of what they can do."""
        if load not in self._needed:
            self._needed[load] = self._least_for(load)
        return self._needed[load]

    def _least_for(self, load: Load) -> int:
        low, high = self._least - 1, self._most
        best = self._plan(load, high)
        is_attainable = best.attainment >= self._sla.attainment
        while high - low > 1:
            # at first as many as decoding alone takes, then by halving
            middle = min(high - 1, 2 * low + 1) if high == self._most else (low + high) // 2
            plan = self._plan(load, middle)
            is_enough = plan.attainment >= self._sla.attainment if is_attainable else _busy(plan) < KEEP_BELOW
            low, high = (low, middle) if is_enough else (middle, high)
        return high

    def _kept(self, needed: int, running: int, forecast: Load | None) -> int:
        if forecast is None:
            return max(needed, min(running, self._least))
        return kept_engines(needed, running=running, busy_share=lambda count: _busy(self._plan(forecast, count)))

    def _plan(self, load: Load, count: int) -> FleetPlan:
        search = FleetSearch(self._engine, load, self._sla, self._transfer, self._routing)
        prefill = 0
        if self._prefill_share:
            prefill = min(count - 1, max(1, round(count * self._prefill_share)))
        return search.at(self._policy.for_load(self._engine, load), prefill, count - prefill)

    def _meet(self, interval: Interval, count: int, backlog: float) -> tuple[float, float]:
        """How many of an interval's requests attain the SLA, and how many wait at its end."""
        if interval.load is None:
            return 0.0, 0.0  # nobody comes, and what waits is served
        plan = self._plan(interval.load, count)
        busy = _busy(plan)
        capacity = interval.num_requests / busy if busy > 0.0 else math.inf
        left = max(0.0, interval.num_requests + backlog - capacity)
        # while a backlog is worked off, whoever arrives waits behind it
        clearing = 1.0 if left > 0.0 else backlog / max(capacity - interval.num_requests, 1e-9)
        return plan.attainment * interval.num_requests * max(0.0, 1.0 - clearing), left


def _busy(plan: FleetPlan) -> float:
    return max(plan.utilization, plan.prefill_utilization or 0.0)


def replay_day(replay: DayReplay, intervals: Sequence[Interval], predictors: Sequence[str]) -> list[DayPlan]:
    """Plan a day by each predictor, by an oracle that knows what comes, and with fixed counts for its peak and its mean.

    Before the first interval nothing is known; it is planned as the oracle plans it, as an operator would start.

    Raises:
        ConfigError: a predictor is unknown, or its package is missing.
    """
    real = [interval.load for interval in intervals]
    plans = [replay.run(name, intervals, _forecasts(name, intervals)) for name in predictors]
    oracle = replay.run(ORACLE, intervals, real, steadily=False)
    counts = [one.engines for one in oracle.intervals]
    fixed = ((PEAK, max(counts)), (MEAN, max(1, round(float(np.mean(counts))))))
    return [
        *plans,
        oracle,
        *(replay.with_counts(name, intervals, [count] * len(intervals), real) for name, count in fixed),
    ]


def _forecasts(name: str, intervals: Sequence[Interval]) -> list[Load | None]:
    seconds = intervals[1].start - intervals[0].start
    period = max(2, round(24 * SECONDS_PER_HOUR / seconds))
    forecast = LoadForecast(lambda: HarmonicPredictor(period) if name == "harmonic" else make_predictor(name))
    found: list[Load | None] = []
    for number, interval in enumerate(intervals):
        found.append(forecast.predict() if number else interval.load)
        forecast.add(interval.load)
    return found
