"""How many engines a load needs, run how: the fewest that attain the SLA, or the best that a budget can do.

Engines are alike. Aggregated, each serves whole requests; disaggregated, some compute prompts, from one line that
all of them serve, and hand the KV to others that decode. Formulas: docs/planning.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from forerun.errors import ConfigError
from forerun.plan.capacity import Prediction, Routing, predict
from forerun.plan.deployment_plan import Layout
from forerun.plan.draft_lengths import Speculation
from forerun.plan.latencies import Lognormal, WaitThenServed
from forerun.plan.lengths import prompt_lengths, tokens_after_first
from forerun.plan.load import Load
from forerun.plan.queueing import erlang_c, mean_wait
from forerun.plan.serving_policies import EngineModel, ServingPolicy, serving_policies
from forerun.plan.simulation.fleet import Transfer
from forerun.plan.sla import LATENCIES, Sla

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

MOST_REPLICAS = 4096  # that are tried where no budget is given
COUNT_GRID = 24
ALMOST_EQUAL = 0.01
"""Of two plans of as many engines the simpler one is taken, unless the other answers so much sooner."""

HALVINGS = 60
"""Of the share of a load that engines keep up with, at most; it ends sooner where the share is known well enough."""

WORTH_ROOM = 0.05
"""A limit on running sequences is planned only if requests end so much sooner with it: more places are room for bursts."""

ALMOST_AS_NEAR = 0.05
"""Where nothing attains the SLA, engines are left out that bring the latencies less near to its limits."""

KEEP_BELOW = 0.8
"""Engines are given up only if those that stay are then busy for less than this share of what they can do.

Each of N - 1 takes N / (N - 1) of the load that it had: a limit on the load before would have it go back and forth."""

PATIENCE = 8  # prefill engines that are added in vain before no more are tried
FREE_TRANSFER = Transfer()


@dataclass(frozen=True, kw_only=True)
class FleetPlan:
    """Engines, how they are run, and what requests will see of them.

    `replicas` engines serve whole requests, or decode where `prefill_replicas` is not 0. Latencies have one rate.
    """

    prefill_replicas: int
    replicas: int
    policy: ServingPolicy
    attainment: float
    ttft: WaitThenServed
    tpot: Lognormal
    icl: Lognormal
    e2el: Lognormal
    batch_size: float
    acceptance_length: float
    utilization: float
    busy_share: float  # of the time that an engine steps, alone or for many
    prefill_utilization: float | None = None  # None: aggregated

    @property
    def is_stable(self) -> bool:
        """Whether the engines keep up with the load."""
        return math.isfinite(float(self.e2el.mean[0]))

    @property
    def layout(self) -> Layout:
        """Whether prompts are computed apart."""
        return Layout.DISAGGREGATED if self.prefill_replicas else Layout.AGGREGATED

    @property
    def num_engines(self) -> int:
        """Engines of both kinds."""
        return self.prefill_replicas + self.replicas

    @property
    def complexity(self) -> tuple[int, ...]:
        """Less is simpler: prompts together, shorter drafts, one K for all batch sizes."""
        changes = len(self.policy.schedule) if self.policy.speculation else 0
        return (self.prefill_replicas, self.policy.max_draft_tokens, changes)


@dataclass(frozen=True, kw_only=True)
class FleetAnswer:
    """The plan for a load, or the best that can be done for it.

    `needed` is how many engines would meet the SLA where the budget has too few; None: no number would.
    """

    plan: FleetPlan
    is_feasible: bool
    needed: int | None


def plan_fleet(
    engine: EngineModel,
    speculations: Sequence[Speculation],
    load: Load,
    sla: Sla,
    *,
    layouts: Sequence[Layout] = (Layout.AGGREGATED,),
    most_engines: int | None = None,
    transfer: Transfer = FREE_TRANSFER,
    routing: Routing = Routing.LEAST_REQUESTS,
) -> FleetAnswer:
    """Find the fewest engines that attain the SLA; no speculation is always one of the ways to run them.

    Where no number of engines attains it, the answer has as many as bring anything, within the budget: it is almost as
    near to the limits as more would be. Where no number keeps up with the load, it has the budget's, or, without one, one.

    Args:
        engine: what each engine is.
        speculations: the ways to draft that may be chosen.
        load: what arrives in all.
        sla: what must be attained.
        layouts: which of them may be chosen.
        most_engines: the budget, engines of both kinds; None: as many as it takes.
        transfer: what handing over a prompt's KV takes.
        routing: which engine a request is sent to.

    Raises:
        ConfigError: the budget has no engine for a layout, or the load does not fit an engine at all.
    """
    if not layouts:
        raise ConfigError("layouts: got none; must be aggregated, disaggregated, or both")
    least = 2 if Layout.AGGREGATED not in layouts else 1
    if most_engines is not None and most_engines < least:
        raise ConfigError(f"budget: got {most_engines} engines; must be at least {least} for {' or '.join(layouts)}")
    policies = serving_policies(engine, [None, *speculations], load)
    search = FleetSearch(engine, load, sla, transfer, routing)
    budget = most_engines or MOST_REPLICAS
    found = search.fewest(policies, layouts, max(budget, MOST_REPLICAS))
    if found is not None and found.num_engines <= budget:
        return FleetAnswer(plan=found, is_feasible=True, needed=found.num_engines)
    best = None if found else search.nearest_of(policies, layouts, budget)
    if best is None or (most_engines is not None and not best.is_stable):
        best = search.best_of(policies, layouts, budget)
    return FleetAnswer(plan=best, is_feasible=False, needed=found.num_engines if found else None)


class _Predicted:
    """What is predicted of counts of engines, each count once."""

    def __init__(self, predict: Callable[[Counts], Prediction]) -> None:
        self._predict = predict
        self._places: dict[int, int] = {}  # by count
        self._found: Prediction | None = None

    def at(self, counts: Counts) -> Prediction:
        """What is predicted of these counts, no two of them equal."""
        missing = [count for count in counts.tolist() if count not in self._places]
        if missing:
            self._places.update((count, place) for place, count in enumerate(missing, len(self._places)))
            new = self._predict(np.array(missing))
            self._found = new if self._found is None else self._found.and_then(new)
        assert self._found is not None, "at least one count is asked for"
        return self._found.at(np.array([self._places[count] for count in counts.tolist()]))


class FleetSearch:
    """Tries policies and counts of engines for one load and one SLA."""

    def __init__(
        self, engine: EngineModel, load: Load, sla: Sla, transfer: Transfer, routing: Routing = Routing.LEAST_REQUESTS
    ) -> None:
        self._engine, self._load, self._sla, self._transfer = engine, load, sla, transfer
        self._routing = routing
        self._predicted: dict[tuple[int, Load], _Predicted] = {}  # by the id of a policy, which they hold

    def _predict(self, policy: ServingPolicy, load: Load, counts: Counts) -> Prediction:
        key = id(policy), load
        if key not in self._predicted:
            self._predicted[key] = _Predicted(functools.partial(self._predict_anew, policy, load))
        return self._predicted[key].at(counts)

    def _predict_anew(self, policy: ServingPolicy, load: Load, counts: Counts) -> Prediction:
        return predict(
            self._engine, policy, load, load.rate / counts, num_engines=counts.astype(np.float64), routing=self._routing
        )

    def fewest(self, policies: Sequence[ServingPolicy], layouts: Sequence[Layout], most: int) -> FleetPlan | None:
        """The fewest engines that attain the SLA, run in the best way for so many; None: `most` do not."""
        found: list[FleetPlan] = []
        for policy in sorted(policies, key=self._least_by_speed):
            for layout in layouts:
                plan = self._fewest_of(policy, layout, most)
                if plan is not None:
                    most = plan.num_engines
                    found.append(plan)
        return _preferred([one for one in found if one.num_engines == most]) if found else None

    def best_of(self, policies: Sequence[ServingPolicy], layouts: Sequence[Layout], most: int) -> FleetPlan:
        """The best way to run so many engines: one that attains the SLA, or else attains it for most requests.

        Where none keeps up with the load, the one that would keep up with most of it.
        """
        tried = [plan for _, plan in self._divided(policies, layouts, most, lambda at: -at.attainment(self._sla))]
        if not any(one.is_stable for one in tried):
            return min(self._keeping_up_with_most(tried), key=lambda one: one.complexity)
        enough = min(self._sla.attainment, max(one.attainment for one in tried) - 1e-9)
        return _preferred([one for one in tried if one.attainment >= enough])

    def nearest_of(self, policies: Sequence[ServingPolicy], layouts: Sequence[Layout], most: int) -> FleetPlan:
        """The fewest engines, up to `most`, whose latencies come almost as near to the SLA's limits as any, where none keep them.

        How many requests attain such an SLA says little: they are in the tails of latencies that are far beyond its limits.
        """
        # first which drafts, then which limits of running sequences
        chosen = self._nearest([one for one in policies if one.has_all_places], layouts, most).policy.speculation
        best = self._nearest([one for one in policies if one.speculation is chosen], layouts, most)
        return self._fewest_as_near(best)

    def _nearest(self, policies: Sequence[ServingPolicy], layouts: Sequence[Layout], most: int) -> FleetPlan:
        tried = self._divided(policies, layouts, most, self._excess)
        near = min(excess for excess, _ in tried) * (1.0 + ALMOST_EQUAL)
        return _preferred([plan for excess, plan in tried if excess <= near])

    def _divided(
        self,
        policies: Sequence[ServingPolicy],
        layouts: Sequence[Layout],
        most: int,
        cost: Callable[[Prediction], Floats],
    ) -> list[tuple[float, FleetPlan]]:
        """So many engines run in each way, prompts together or apart, and what they cost; apart as many of each kind as cost least."""
        found = []
        for policy in policies:
            for layout in layouts:
                if layout is Layout.AGGREGATED or most == 1:
                    prefill = np.array([0])
                    at = self._predict(policy, self._load, np.array([most]))
                else:
                    prefill = np.array(_spread(1, most - 1))
                    at = self.predict_apart(policy, prefill, most - prefill)
                costs = cost(at)
                best = int(costs.argmin())
                count = int(prefill[best])
                found.append((float(costs[best]), self._found(policy, count, most - count, at.at(np.array([best])))))
        return found

    def _keeping_up_with_most(self, plans: Sequence[FleetPlan]) -> Sequence[FleetPlan]:
        """Of plans of a load that is too much for all of them those that keep up with the largest share of it, or almost."""
        low, high = 0.0, 1.0
        for _ in range(HALVINGS):
            share = (low + high) / 2.0
            load = replace(self._load, rate=share * self._load.rate)
            less = FleetSearch(self._engine, load, self._sla, self._transfer, self._routing)
            stable = [one for one in plans if less.at(one.policy, one.prefill_replicas, one.replicas).is_stable]
            low, high, plans = (share, high, stable) if stable else (low, share, plans)
            if high - low < ALMOST_EQUAL * low:
                break
        return plans

    def _fewest_as_near(self, plan: FleetPlan) -> FleetPlan:
        """The fewest engines, run as in a plan, that come almost as near to the SLA as the plan does."""
        near = float(self._excess(plan)[0]) * (1.0 + ALMOST_AS_NEAR)
        policy, prefill, replicas = plan.policy, plan.prefill_replicas, plan.replicas

        def fewest(predict: Callable[[Counts], Prediction], limit: float, most: int) -> int:
            return least_count(lambda counts: self._excess(predict(counts)) <= limit, most) or most

        if not prefill:
            return self.at(policy, 0, fewest(lambda counts: self._predict(policy, self._load, counts), near, replicas))
        half = near * (1.0 + ALMOST_AS_NEAR / 2.0) / (1.0 + ALMOST_AS_NEAR)
        prefill = fewest(lambda counts: self.predict_apart(policy, counts, replicas), half, prefill)
        return self.at(
            policy, prefill, fewest(lambda counts: self.predict_apart(policy, prefill, counts), near, replicas)
        )

    def _excess(self, at: Prediction | FleetPlan) -> Floats:
        """How many times as long as its limit the worst latency is, of so many requests as must keep it; infinite in overload."""
        limits = {name: getattr(self._sla, name) for name in LATENCIES}
        times = [
            getattr(at, name).quantile(self._sla.attainment) / limit
            for name, limit in limits.items()
            if limit is not None
        ]
        return np.where(at.is_stable, np.max(times, axis=0), np.inf)

    def _least_by_speed(self, policy: ServingPolicy) -> float:
        """Engines below which even decoding alone cannot keep up."""
        steps = policy.step_seconds * policy.steps_for(self._load.osl - 1.0)
        return self._load.rate * float(np.min(steps / np.arange(1, policy.max_num_seqs + 1)))

    def _fewest_of(self, policy: ServingPolicy, layout: Layout, most: int) -> FleetPlan | None:
        if self._least_by_speed(policy) > most:
            return None
        if layout is Layout.DISAGGREGATED:
            return self._fewest_apart(policy, most)

        return self._fewest(policy, 0, lambda counts: self._predict(policy, self._load, counts), most)

    def _fewest(
        self, policy: ServingPolicy, prefill: int, predict: Callable[[Counts], Prediction], most: int
    ) -> FleetPlan | None:
        """The fewest engines, beside `prefill`, that attain the SLA by what is predicted of each count; None: `most` do not."""
        seen: dict[int, tuple[Prediction, int]] = {}

        def is_enough(counts: Counts) -> npt.NDArray[np.bool_]:
            at = predict(counts)
            seen.update((count, (at, number)) for number, count in enumerate(counts.tolist()))
            return np.asarray(at.attainment(self._sla) >= self._sla.attainment)

        count = least_count(is_enough, most)
        if count is None:
            return None
        at, number = seen[count]
        return self._found(policy, prefill, count, at.at(np.array([number])))

    def at(self, policy: ServingPolicy, prefill: int, replicas: int) -> FleetPlan:
        """So many engines, whether they attain the SLA or not; `prefill` 0: aggregated."""
        return self._apart(policy, prefill, replicas) if prefill else self._aggregated(policy, replicas)

    def _aggregated(self, policy: ServingPolicy, count: int) -> FleetPlan:
        return self._found(policy, 0, count, self._predict(policy, self._load, np.array([count])))

    def _found(self, policy: ServingPolicy, prefill: int, replicas: int, at: Prediction) -> FleetPlan:
        """So many engines with what is predicted of them at one rate."""
        return FleetPlan(
            prefill_replicas=prefill,
            replicas=replicas,
            policy=policy,
            attainment=float(at.attainment(self._sla)[0]),
            ttft=at.ttft,
            tpot=at.tpot,
            icl=at.icl,
            e2el=at.e2el,
            batch_size=float(at.batch_size[0]),
            acceptance_length=float(at.acceptance_length[0]),
            utilization=float(at.utilization[0]),
            busy_share=float(at.busy_share[0]),
            prefill_utilization=self._load.rate * self._prompt_seconds / prefill if prefill else None,
        )

    def _fewest_apart(self, policy: ServingPolicy, most: int) -> FleetPlan | None:
        """Few prefill engines and few decoding ones, whose sum is least.

        Each kind alone must attain the SLA, were the other kind without limit; from these counts it goes upwards.
        """
        first, unlimited = self._fewest_prefill, MOST_REPLICAS
        if first is None or first >= most:
            return None
        fewest = least_count(lambda counts: self._attains_apart(policy, unlimited, counts), most - first)
        if fewest is None:
            return None
        first = least_count(lambda counts: self._attains_apart(policy, counts, unlimited), most - fewest)
        best: FleetPlan | None = None
        num_vain = 0
        while first is not None and num_vain < PATIENCE:
            limit = (best.num_engines - 1 if best else most) - first
            if limit < fewest:
                break
            found = self._fewest(policy, first, functools.partial(self.predict_apart, policy, first), limit)
            num_vain += 1
            if found is not None:
                best, num_vain = found, 0
            first += 1
        return best

    @cached_property
    def _fewest_prefill(self) -> int | None:
        """Prefill engines with which time to first token alone is attained; None: no number is enough."""
        limit = self._sla.ttft

        def is_enough(counts: Counts) -> npt.NDArray[np.bool_]:
            line = self._prefill(counts)
            is_stable = np.isfinite(line.mean)
            return np.asarray(is_stable & (limit is None or line.share_within(limit) >= self._sla.attainment))

        return least_count(is_enough, MOST_REPLICAS)

    def _prefill(self, counts: Counts) -> WaitThenServed:
        """Time to first token where all prompts wait in one line for so many engines, [counts]."""
        load, service = self._load, self._prompt_seconds
        cv2 = float(self._seconds_of_prompts.var()) / service**2
        chances = np.array([erlang_c(count, load.rate * service) for count in counts.tolist()])
        waits = np.array(
            [mean_wait(load.rate, service, count, arrival_cv2=load.cv**2, service_cv2=cv2) for count in counts.tolist()]
        )
        return WaitThenServed(
            service=np.tile(self._seconds_of_prompts, (len(counts), 1)),
            wait_chance=chances,
            mean_wait_of_waiting=np.divide(waits, chances, out=np.zeros_like(waits), where=chances > 0.0),
        )

    def _attains_apart(
        self, policy: ServingPolicy, prefill: int | Counts, decode: int | Counts
    ) -> npt.NDArray[np.bool_]:
        attained = self.predict_apart(policy, prefill, decode).attainment(self._sla)
        enough: npt.NDArray[np.bool_] = attained >= self._sla.attainment
        return enough

    def _apart(self, policy: ServingPolicy, prefill: int, decode: int) -> FleetPlan:
        return self._found(policy, prefill, decode, self.predict_apart(policy, prefill, decode))

    @cached_property
    def _seconds_of_prompts(self) -> Floats:
        """Seconds of the steps of equally likely prompts in an engine that does nothing else."""
        load, engine = self._load, self._engine
        chunks = np.ceil(prompt_lengths(load) / engine.max_num_batched_tokens)
        idle = engine.step_times.seconds(num_rows=0, num_sequences=0, num_context_tokens=0)
        seconds: Floats = chunks * idle + engine.seconds_of_prompts(load)
        return seconds

    @property
    def _prompt_seconds(self) -> float:
        """Their mean."""
        return float(self._seconds_of_prompts.mean())

    def predict_apart(self, policy: ServingPolicy, prefill: int | Counts, decode: int | Counts) -> Prediction:
        """What requests see of `prefill` engines, for which prompts wait in one line, and `decode` ones, each with its part of the load.

        Counts are numbers or arrays, paired.
        """
        load = self._load
        first, decode = np.broadcast_arrays(np.atleast_1d(prefill), np.atleast_1d(decode))
        # whoever decodes has all KV but that of the first token, which gives the second
        handed = replace(load, osl=max(1.0, load.osl - 1.0), isl_cv=0.0, prefix_hit_rate=1.0 - 1.0 / load.isl)
        counts, numbers = np.unique(decode, return_inverse=True)
        at = self._predict(policy, handed, counts).at(numbers)
        ttft = self._prefill(first)
        if load.osl <= 1.0:
            zeros = np.zeros(len(decode))
            nothing = Lognormal(zeros, zeros)
            with np.errstate(invalid="ignore"):
                e2el = Lognormal(ttft.mean, np.nan_to_num(ttft.variance / ttft.mean**2))
            return replace(at, is_stable=np.isfinite(ttft.mean), ttft=ttft, tpot=nothing, icl=nothing, e2el=e2el)
        between = self._transfer.of_prompt(round(load.isl))
        spread = ((between - self._transfer.seconds) * load.isl_cv) ** 2  # its variance
        second = between + at.ttft.mean, at.ttft.variance + spread  # mean and variance of the second token's wait
        after = np.tile(tokens_after_first(load), (len(decode), 1))
        with np.errstate(invalid="ignore"):
            tpot = _beginning_with(*second, at.tpot, after)
            icl = _beginning_with(*second, at.icl, np.maximum(1.0, after / at.acceptance_length[:, None]))
            mean = ttft.mean + between + at.e2el.mean
            e2el = Lognormal(mean, np.nan_to_num((ttft.variance + spread + at.e2el.variance) / mean**2))
        return replace(at, is_stable=at.is_stable & np.isfinite(mean), ttft=ttft, tpot=tpot, icl=icl, e2el=e2el)


def _beginning_with(mean: Floats, variance: Floats, gaps: Lognormal, counts: Floats) -> Lognormal:
    """The mean of all gaps of a request, of which the first has this mean and variance, and the others are as `gaps` says.

    Of n gaps it is gap + (first - gap) / n, so how many there are counts only as far as the first one is longer.

    Args:
        mean: [rates], seconds of the first gap.
        variance: [rates], of the same.
        gaps: the mean of a request's other gaps.
        counts: [rates, points], equally likely numbers of gaps.
    """
    share, spread = (1.0 / counts).mean(axis=1), (1.0 / counts).var(axis=1)
    longer = mean - gaps.mean
    all_mean = gaps.mean + share * longer
    of_gaps = (1.0 - share) ** 2 * gaps.variance + (share**2 + spread) * variance
    return Lognormal(all_mean, np.nan_to_num((of_gaps + spread * longer**2) / all_mean**2))


def _preferred(plans: Sequence[FleetPlan]) -> FleetPlan:
    """Of plans with as many engines one that answers soonest, or almost: rather with more places, then rather a simpler one."""
    roomiest = max(one.policy.max_num_seqs for one in _near_soonest(plans, WORTH_ROOM))
    roomy = [one for one in _near_soonest(plans, WORTH_ROOM) if one.policy.max_num_seqs == roomiest]
    return min(_near_soonest(roomy, ALMOST_EQUAL), key=lambda one: one.complexity)


def _near_soonest(plans: Sequence[FleetPlan], margin: float) -> list[FleetPlan]:
    soonest = min(float(one.e2el.mean[0]) for one in plans)
    return [one for one in plans if float(one.e2el.mean[0]) <= soonest * (1.0 + margin)]


def least_count(is_enough: Callable[[Counts], npt.NDArray[np.bool_]], most: int) -> int | None:
    """The least count from 1 to `most` that is enough, where more than enough is enough too; None: not even `most`."""
    low, high = 0, most + 1  # low is not enough; high is, or is past the end
    while high - low > 1:
        counts = np.array(_spread(low + 1, high - 1))
        enough = is_enough(counts)
        if not enough.any():
            low = int(counts[-1])
            continue
        first = int(np.argmax(enough))
        low, high = (low if first == 0 else int(counts[first - 1])), int(counts[first])
    return high if high <= most else None


@functools.lru_cache
def _spread(first: int, last: int) -> tuple[int, ...]:
    """Counts from `first` to `last`, all or so many in equal ratios."""
    if last - first < COUNT_GRID:
        return tuple(range(first, last + 1))
    return tuple(sorted({round(count) for count in np.geomspace(first, last, COUNT_GRID)}))


def kept_engines(needed: int, *, running: int, busy_share: Callable[[int], float]) -> int:
    """How many engines to go on with where fewer than now would do.

    Args:
        needed: the fewest that attain the SLA.
        running: how many there are.
        busy_share: utilization by the count of engines.
    """
    for count in range(needed, running):
        if busy_share(count) < KEEP_BELOW:
            return count
    return max(needed, running)
