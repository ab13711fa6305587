"""A day of traffic held against the simulator: the trace itself, and engines that start and drain as it was decided."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from forerun.plan.confirmation import planned_engine
from forerun.plan.day_plan import DayPlan, SimulatedDay
from forerun.plan.deployment_planner import DEFAULTS, PlanningOptions
from forerun.plan.fleet_plan import FleetPlan
from forerun.plan.profile import Profile
from forerun.plan.simulation.fleet import Fleet, FleetChange
from forerun.plan.simulation.requests import SimulatedRequest
from forerun.plan.simulation.result import SimulationResult
from forerun.plan.sla import Sla

STEPS_OF_PROGRESS = 100  # messages of one simulation


def confirmed_days(
    profile: Profile,
    plan: FleetPlan,
    days: Sequence[DayPlan],
    requests: Sequence[SimulatedRequest],
    sla: Sla,
    options: PlanningOptions = DEFAULTS,
    *,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> list[DayPlan]:
    """The days with what the simulator says of each; days with the same engines at the same times are simulated once.

    Args:
        profile: of the engines.
        plan: how each is run.
        days: what was decided.
        requests: the trace that they were planned for.
        sla: what a request must keep.
        options: those of the plan.
        seed: of the simulations.
        progress: is told what is simulated.

    Raises:
        ConfigError: a request is longer than the profile's context, or the profile's traces are damaged.
    """
    engine = planned_engine(profile, plan, options)
    found: dict[Fleet, SimulatedDay] = {}
    confirmed = []
    for day in days:
        fleet = fleet_of(day, options)
        if fleet not in found:
            result = engine.simulate(
                requests, fleet=fleet, seed=seed, progress=_by_hundredths(day.name, len(requests), progress)
            )
            found[fleet] = _outcome(result, day, sla, seed)
        confirmed.append(replace(day, simulated=found[fleet]))
    return confirmed


def fleet_of(day: DayPlan, options: PlanningOptions = DEFAULTS) -> Fleet:
    """The engines of a day, with a change at the beginning of each interval that has another number of them."""
    first = day.intervals[0]
    changes = [
        FleetChange(
            at=after.start, replicas=after.engines - after.prefill_engines, prefill_replicas=after.prefill_engines
        )
        for before, after in pairwise(day.intervals)
        if (before.engines, before.prefill_engines) != (after.engines, after.prefill_engines)
    ]
    return Fleet(
        replicas=first.engines - first.prefill_engines,
        prefill_replicas=first.prefill_engines,
        routing=options.routing,
        transfer=options.transfer,
        changes=tuple(changes),
    )


def _outcome(result: SimulationResult, day: DayPlan, sla: Sla, seed: int) -> SimulatedDay:
    attained, counts = ([0] * len(day.intervals) for _ in range(2))
    for request, is_attained in zip(result.requests, result.attained(sla), strict=True):
        number = math.floor(request.arrival / day.interval)
        counts[number] += 1
        attained[number] += is_attained
    return SimulatedDay(
        seed=seed,
        engine_seconds=result.engine_seconds(since=0.0, until=day.seconds),
        attained=tuple(attained),
        num_requests=tuple(counts),
        num_preemptions=result.num_preemptions,
    )


def _by_hundredths(name: str, count: int, progress: Callable[[str], None]) -> Callable[[int], None]:
    said = -1

    def note(num_ended: int) -> None:
        nonlocal said
        share = num_ended * STEPS_OF_PROGRESS // count
        if share > said:
            said = share
            progress(f"simulating the day by {name}: {num_ended} of {count} requests")

    return note
