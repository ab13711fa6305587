"""A day of traffic, planned interval by interval as it would have been: engines, cost, and who attained the SLA.

Before each interval a predictor says what will come, from what came before; the planner says how many engines that
needs; then the interval's real load meets them. What an interval cannot serve waits and adds to the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from forerun.errors import ConfigError
from forerun.plan.capacity import Routing
from forerun.plan.day_plan import SECONDS_PER_HOUR, DayPlan, PlannedInterval
from forerun.plan.fleet_plan import KEEP_BELOW, MOST_REPLICAS, FleetPlan, FleetSearch, kept_engines
from forerun.plan.load import Load
from forerun.plan.predictors import Predictor, make_predictor
from forerun.plan.serving_policies import EngineModel, ServingPolicy
from forerun.plan.shared_prefixes import common_beginning, repeated_share, share_of_beginning
from forerun.plan.simulation.fleet import Transfer
from forerun.plan.simulation.requests import SimulatedRequest
from forerun.plan.sla import Sla

DEFAULT_INTERVAL = 180.0
"""Seconds from one decision to the next, as in Dynamo's planner."""

MOST_INTERVALS = 50_000  # a month of intervals of a minute

DAY = 24 * SECONDS_PER_HOUR
HARMONIC = "harmonic"
SAID_FROM = 0.05
"""Of the prompt tokens that prefix caches find, how many the formulas may miss before it is said."""

ORACLE, PEAK, MEAN = "oracle", "fixed: peak", "fixed: mean"
"""Plans to compare with: by the load that comes, and fixed counts for the most and the mean that any interval needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """What arrived in one interval; `load` is None where nothing did."""

    start: float  # seconds
    num_requests: int
    load: Load | None


def intervals_of(
    requests: Sequence[SimulatedRequest], seconds: float = DEFAULT_INTERVAL, *, prefix_hit_rate: float | None = None
) -> list[Interval]:
    """Count a trace's requests by interval.

    Args:
        requests: of the trace.
        seconds: of an interval.
        prefix_hit_rate: of all loads; None: what the prompts have of the beginning that most of them share.

    Raises:
        ConfigError: the interval is not above 0, or the trace is shorter than two of them, or has too many.
    """
    if not 0.0 < seconds < math.inf:
        raise ConfigError(f"interval: got {seconds:g} s; must be above 0")
    last = requests[-1].arrival if requests else 0.0
    if last / seconds >= MOST_INTERVALS:
        raise ConfigError(
            f"interval: got {seconds:g} s, of which the trace's {last:g} s have more than {MOST_INTERVALS:,}; must be at least "
            f"{last / MOST_INTERVALS:.3g} s"
        )
    count = math.floor(last / seconds) + 1
    if count < 2:
        raise ConfigError(
            f"replay: the trace has {len(requests)} requests in {last:g} s; must be longer than one interval of "
            f"{seconds:g} s: give a longer trace, or a shorter --interval"
        )
    parts: list[list[SimulatedRequest]] = [[] for _ in range(count)]
    for request in requests:
        parts[math.floor(request.arrival / seconds)].append(request)
    beginning = common_beginning(requests) if prefix_hit_rate is None else ()

    def load_of(part: Sequence[SimulatedRequest]) -> Load | None:
        if not part:
            return None
        shared = share_of_beginning(part, beginning) if prefix_hit_rate is None else prefix_hit_rate
        return _load_of(part, seconds, shared)

    return [
        Interval(start=number * seconds, num_requests=len(part), load=load_of(part))
        for number, part in enumerate(parts)
    ]


def _load_of(requests: Sequence[SimulatedRequest], seconds: float, prefix_hit_rate: float) -> Load:
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
        prefix_hit_rate=prefix_hit_rate,
    )


class LoadForecast:
    """Predicts the next interval's load: its rate and lengths by a predictor each, its unevenness as last seen.

    Args:
        make: makes a predictor.
        longest: the most tokens that a request can have, beyond which no mean is predicted.
    """

    def __init__(self, make: Callable[[], Predictor], *, longest: float = math.inf) -> None:
        self._rate, self._isl, self._osl = make(), make(), make()
        self._longest = longest
        self._last: Load | None = None
        self._last_rate = 0.0

    def add(self, load: Load | None) -> None:
        """Note what an interval brought.

        An empty interval has no lengths: the last ones are noted again, so that all three series stay equally long and
        `harmonic` finds the same period in them.
        """
        self._last_rate = load.rate if load else 0.0
        self._rate.add(self._last_rate)
        self._last = load or self._last
        if self._last is not None:
            self._isl.add(self._last.isl)
            self._osl.add(self._last.osl)

    def predict(self) -> Load | None:
        """The next interval's load; None: nothing will come, or nothing is known yet.

        Where a trend predicts nothing although the last interval was not empty, that one's rate is taken.
        """
        rate = self._rate.predict() or self._last_rate
        if self._last is None or rate <= 0.0:
            return None
        last = self._last
        isl, osl = max(1.0, self._isl.predict()), max(1.0, self._osl.predict())
        if isl + osl > self._longest:  # a trend has run away: as last seen
            isl, osl = last.isl, last.osl
        return replace(last, rate=rate, isl=isl, osl=osl)


def scale_down_load(forecast: Load, last: Load | None) -> Load:
    """The load that must be served before engines are given up: the forecast, at no less than the last measured rate.

    `last` is None where nobody came.
    """
    return replace(forecast, rate=max(forecast.rate, last.rate if last else 0.0))


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
        self._engine, self._policy = engine.beside(policy.speculation), policy
        self._sla, self._transfer = sla, transfer
        self._prefill_share, self._most = prefill_share, most_engines or MOST_REPLICAS
        self._least = 2 if prefill_share else 1
        self._needed: dict[Load, int] = {}

    @property
    def longest(self) -> int:
        """The most tokens of a request."""
        return min(self._engine.max_model_len, self._engine.num_blocks * self._engine.block_size)

    def run(
        self, name: str, intervals: Sequence[Interval], forecasts: Sequence[Load | None], *, steadily: bool = True
    ) -> DayPlan:
        """Plan each interval for its forecast; `steadily`: engines are given up only where the others stay unbusy."""
        counts: list[int] = []
        before = [None, *(interval.load for interval in intervals[:-1])]
        for forecast, last in zip(forecasts, before, strict=True):
            needed = self._least if forecast is None else self.engines_for(forecast)
            running = counts[-1] if counts and steadily else needed
            counts.append(self._kept(needed, running, None if forecast is None else scale_down_load(forecast, last)))
        return self.with_counts(name, intervals, counts, forecasts)

    def with_counts(
        self, name: str, intervals: Sequence[Interval], counts: Sequence[int], forecasts: Sequence[Load | None]
    ) -> DayPlan:
        """What comes of so many engines in each interval."""
        seconds = intervals[1].start - intervals[0].start
        backlog, planned = 0.0, []
        load: Load | None = None  # of whoever came last: where nobody comes, they are those who wait
        for interval, count, forecast in zip(intervals, counts, forecasts, strict=True):
            load = interval.load or load
            attained, backlog = self._meet(interval.num_requests, load, seconds, count, backlog)
            planned.append(
                PlannedInterval(
                    start=interval.start,
                    predicted_rate=forecast.rate if forecast else 0.0,
                    rate=interval.load.rate if interval.load else 0.0,
                    engines=count,
                    prefill_engines=self._prefill_of(count),
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
            is_enough = (
                plan.attainment >= self._sla.attainment if is_attainable else plan.busiest_utilization < KEEP_BELOW
            )
            low, high = (low, middle) if is_enough else (middle, high)
        return high

    def _prefill_of(self, count: int) -> int:
        """How many of so many engines compute prompts; 0: aggregated."""
        return min(count - 1, max(1, round(count * self._prefill_share))) if self._prefill_share else 0

    def _kept(self, needed: int, running: int, forecast: Load | None) -> int:
        if forecast is None:
            return max(needed, min(running, self._least))
        return kept_engines(
            needed, running=running, busy_share=lambda count: self._plan(forecast, count).busiest_utilization
        )

    def _plan(self, load: Load, count: int) -> FleetPlan:
        search = FleetSearch(self._engine, load, self._sla, self._transfer, self._routing)
        prefill = self._prefill_of(count)
        return search.at(self._policy.for_load(self._engine, load), prefill, count - prefill)

    def _meet(
        self, num_requests: int, load: Load | None, seconds: float, count: int, backlog: float
    ) -> tuple[float, float]:
        """How many of an interval's requests attain the SLA, and how many wait at its end; load None: nobody has come yet."""
        if load is None:
            return 0.0, 0.0
        plan = self._plan(load, count)
        busy = plan.busiest_utilization
        capacity = load.rate * seconds / busy if busy > 0.0 else math.inf
        left = max(0.0, num_requests + backlog - capacity)
        # while a backlog is worked off, whoever arrives waits behind it
        clearing = 1.0 if left > 0.0 else backlog / max(capacity - num_requests, 1e-9)
        return plan.attainment * num_requests * max(0.0, 1.0 - clearing), left


def replay_day(
    replay: DayReplay, intervals: Sequence[Interval], predictors: Sequence[str], *, period: float = DAY
) -> list[DayPlan]:
    """Plan a day by each predictor, by an oracle that knows what comes, and with fixed counts for its peak and its mean.

    Before the first interval nothing is known; it is planned as the oracle plans it, as an operator would start.

    Args:
        replay: plans an interval.
        intervals: of the day.
        predictors: their names.
        period: seconds after which the traffic repeats itself, for `harmonic`.

    Raises:
        ConfigError: a predictor is unknown, its package is missing, or the period is shorter than two intervals.
    """
    real = [interval.load for interval in intervals]
    plans = [
        replay.run(name, intervals, _forecasts(name, intervals, period=period, longest=replay.longest))
        for name in predictors
    ]
    oracle = replay.run(ORACLE, intervals, real, steadily=False)
    counts = [one.engines for one in oracle.intervals]
    fixed = ((PEAK, max(counts)), (MEAN, max(1, round(float(np.mean(counts))))))
    return [
        *plans,
        oracle,
        *(replay.with_counts(name, intervals, [count] * len(intervals), real) for name, count in fixed),
    ]


def _forecasts(name: str, intervals: Sequence[Interval], *, period: float, longest: int) -> list[Load | None]:
    seconds = intervals[1].start - intervals[0].start
    if name == HARMONIC and period < 2 * seconds:
        raise ConfigError(
            f"period: got {period:g} s, and intervals of {seconds:g} s; must be at least two of them for the predictor "
            f"{HARMONIC}: give a longer --period, a shorter --interval, or other predictors"
        )
    forecast = LoadForecast(lambda: make_predictor(name, period=period / seconds), longest=longest)
    found: list[Load | None] = []
    for number, interval in enumerate(intervals):
        found.append(forecast.predict() if number else interval.load)
        forecast.add(interval.load)
    return found


def replay_notes(
    requests: Sequence[SimulatedRequest],
    intervals: Sequence[Interval],
    predictors: Sequence[str],
    *,
    period: float = DAY,
) -> list[str]:
    """What is to be known of a day's figures: of the predictors, and of the prompts that a prefix cache finds again."""
    notes, seconds = [], len(intervals) * (intervals[1].start - intervals[0].start)
    if HARMONIC in predictors and seconds <= period:
        notes.append(
            f"{HARMONIC} predicts the last value, as constant does, until it has seen a whole period of {period:g} s; the trace "
            f"has {seconds:g} s: give the time after which its traffic repeats itself as --period, or a longer trace"
        )
    repeated = repeated_share(requests)
    loads = [one.load for one in intervals if one.load is not None]
    counted = sum(one.prefix_hit_rate * one.isl * one.rate for one in loads) / sum(one.isl * one.rate for one in loads)
    if repeated > counted + SAID_FROM:
        notes.append(
            f"{repeated:.0%} of the trace's prompt tokens were in earlier prompts, and {counted:.0%} are in the beginning that "
            "most prompts share, which is what the formulas take for cached; --confirm simulates the prefix caches"
        )
    return notes
