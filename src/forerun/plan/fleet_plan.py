"""How many engines a load needs, run how: the fewest that attain the SLA, or the best that a budget can do.

What requests see of so many is predicted in `fleet_prediction`; here counts and ways to run engines are tried.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from forerun.errors import ConfigError
from forerun.plan.capacity import Prediction, Routing
from forerun.plan.deployment_plan import Layout
from forerun.plan.draft_lengths import Speculation
from forerun.plan.fleet_prediction import FleetPrediction
from forerun.plan.latencies import Lognormal, WaitThenServed
from forerun.plan.load import Load
from forerun.plan.serving_policies import EngineModel, ServingPolicy, serving_policies
from forerun.plan.simulation.fleet import Transfer
from forerun.plan.sla import LATENCIES, Sla

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

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
    def busiest_utilization(self) -> float:
        """Utilization of the busier kind of engines."""
        return max(self.utilization, self.prefill_utilization or 0.0)

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


class FleetSearch:
    """Tries policies and counts of engines for one load and one SLA."""

    def __init__(
        self, engine: EngineModel, load: Load, sla: Sla, transfer: Transfer, routing: Routing = Routing.LEAST_REQUESTS
    ) -> None:
        self._fleet = FleetPrediction(engine=engine, load=load, transfer=transfer, routing=routing)
        self._sla = sla

    def at(self, policy: ServingPolicy, prefill: int, replicas: int) -> FleetPlan:
        """So many engines, whether they attain the SLA or not; `prefill` 0: aggregated."""
        return self._plan(policy, prefill, replicas, self._beside(policy, prefill)(np.array([replicas])))

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

    def _beside(self, policy: ServingPolicy, prefill: int) -> Callable[[Counts], Prediction]:
        """What predicts counts of engines beside so many that compute prompts; 0: these engines do that too."""
        if prefill:
            return functools.partial(self._fleet.apart, policy, prefill)
        return functools.partial(self._fleet.together, policy)

    def _plan(self, policy: ServingPolicy, prefill: int, replicas: int, at: Prediction) -> FleetPlan:
        """So many engines with what is predicted of them at one rate."""
        busy = self._fleet.load.rate * self._fleet.prompt_seconds / prefill if prefill else None
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
            prefill_utilization=busy,
        )

    def _attains(self, at: Prediction) -> Bools:
        """Which of the counts that were predicted attain the SLA."""
        return np.asarray(at.attainment(self._sla) >= self._sla.attainment)

    def _least_by_speed(self, policy: ServingPolicy) -> float:
        """Engines below which even decoding alone cannot keep up."""
        load = self._fleet.load
        steps = policy.step_seconds * policy.steps_for(load.osl - 1.0)
        return load.rate * float(np.min(steps / np.arange(1, policy.max_num_seqs + 1)))

    def _fewest_of(self, policy: ServingPolicy, layout: Layout, most: int) -> FleetPlan | None:
        if self._least_by_speed(policy) > most:
            return None
        return self._fewest_apart(policy, most) if layout is Layout.DISAGGREGATED else self._fewest(policy, 0, most)

    def _fewest(self, policy: ServingPolicy, prefill: int, most: int) -> FleetPlan | None:
        """The fewest engines, beside `prefill`, that attain the SLA; None: `most` do not."""
        predict = self._beside(policy, prefill)
        count = least_count(lambda counts: self._attains(predict(counts)), most)
        return None if count is None else self.at(policy, prefill, count)

    def _fewest_apart(self, policy: ServingPolicy, most: int) -> FleetPlan | None:
        """Few prefill engines and few decoding ones, whose sum is least.

        Each kind alone must attain the SLA, were the other kind without limit; from these counts it goes upwards.
        """
        first, unlimited = self._fewest_prefill, MOST_REPLICAS
        if first is None or first >= most:
            return None
        fewest = least_count(lambda counts: self._attains(self._fleet.apart(policy, unlimited, counts)), most - first)
        if fewest is None:
            return None
        first = least_count(lambda counts: self._attains(self._fleet.apart(policy, counts, unlimited)), most - fewest)
        best: FleetPlan | None = None
        num_vain = 0
        while first is not None and num_vain < PATIENCE:
            limit = (best.num_engines - 1 if best else most) - first
            if limit < fewest:
                break
            found = self._fewest(policy, first, limit)
            num_vain += 1
            if found is not None:
                best, num_vain = found, 0
            first += 1
        return best

    @cached_property
    def _fewest_prefill(self) -> int | None:
        """Prefill engines with which time to first token alone is attained; None: no number is enough."""
        limit = self._sla.ttft

        def is_enough(counts: Counts) -> Bools:
            line = self._fleet.first_tokens(counts)
            is_stable = np.isfinite(line.mean)
            return np.asarray(is_stable & (limit is None or line.share_within(limit) >= self._sla.attainment))

        return least_count(is_enough, MOST_REPLICAS)

    def _divided(
        self,
        policies: Sequence[ServingPolicy],
        layouts: Sequence[Layout],
        most: int,
        cost: Callable[[Prediction], Floats],
    ) -> list[tuple[float, FleetPlan]]:
        """So many engines run in each way, prompts together or apart, and what they cost; apart as many of each kind as cost least."""
        found = []
        for policy, layout in itertools.product(policies, layouts):
            if layout is Layout.AGGREGATED or most == 1:
                prefill = np.array([0])
                at = self._fleet.together(policy, np.array([most]))
            else:
                prefill = np.array(_spread(1, most - 1))
                at = self._fleet.apart(policy, prefill, most - prefill)
            costs = cost(at)
            best = int(costs.argmin())
            count = int(prefill[best])
            found.append((float(costs[best]), self._plan(policy, count, most - count, at.at(np.array([best])))))
        return found

    def _keeping_up_with_most(self, plans: Sequence[FleetPlan]) -> Sequence[FleetPlan]:
        """Of plans of a load that is too much for all of them those that keep up with the largest share of it, or almost."""
        fleet, low, high = self._fleet, 0.0, 1.0
        for _ in range(HALVINGS):
            share = (low + high) / 2.0
            load = replace(fleet.load, rate=share * fleet.load.rate)
            less = FleetSearch(fleet.engine, load, self._sla, fleet.transfer, fleet.routing)
            stable = [one for one in plans if less.at(one.policy, one.prefill_replicas, one.replicas).is_stable]
            low, high, plans = (share, high, stable) if stable else (low, share, plans)
            if high - low < ALMOST_EQUAL * low:
                break
        return plans

    def _nearest(self, policies: Sequence[ServingPolicy], layouts: Sequence[Layout], most: int) -> FleetPlan:
        tried = self._divided(policies, layouts, most, self._excess)
        near = min(excess for excess, _ in tried) * (1.0 + ALMOST_EQUAL)
        return _preferred([plan for excess, plan in tried if excess <= near])

    def _fewest_as_near(self, plan: FleetPlan) -> FleetPlan:
        """The fewest engines, run as in a plan, that come almost as near to the SLA as the plan does."""
        excess = float(self._excess(plan)[0])
        policy, prefill, replicas = plan.policy, plan.prefill_replicas, plan.replicas

        def fewest(predict: Callable[[Counts], Prediction], may_lose: float, most: int) -> int:
            limit = excess * (1.0 + may_lose)
            return least_count(lambda counts: self._excess(predict(counts)) <= limit, most) or most

        if prefill:  # of what may be lost half to each kind
            prefill = fewest(
                lambda counts: self._fleet.apart(policy, counts, replicas), ALMOST_AS_NEAR / 2.0, plan.prefill_replicas
            )
        return self.at(policy, prefill, fewest(self._beside(policy, prefill), ALMOST_AS_NEAR, replicas))

    def _excess(self, at: Prediction | FleetPlan) -> Floats:
        """How many times as long as its limit the worst latency is, of so many requests as must keep it; infinite in overload."""
        limits = {name: getattr(self._sla, name) for name in LATENCIES}
        times = [
            getattr(at, name).quantile(self._sla.attainment) / limit
            for name, limit in limits.items()
            if limit is not None
        ]
        return np.where(at.is_stable, np.max(times, axis=0), np.inf)


def _preferred(plans: Sequence[FleetPlan]) -> FleetPlan:
    """Of plans with as many engines one that answers soonest, or almost: rather with more places, then rather a simpler one."""
    roomiest = max(one.policy.max_num_seqs for one in _near_soonest(plans, WORTH_ROOM))
    roomy = [one for one in _near_soonest(plans, WORTH_ROOM) if one.policy.max_num_seqs == roomiest]
    return min(_near_soonest(roomy, ALMOST_EQUAL), key=lambda one: one.complexity)


def _near_soonest(plans: Sequence[FleetPlan], margin: float) -> list[FleetPlan]:
    soonest = min(float(one.e2el.mean[0]) for one in plans)
    return [one for one in plans if float(one.e2el.mean[0]) <= soonest * (1.0 + margin)]


def least_count(is_enough: Callable[[Counts], Bools], most: int) -> int | None:
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
