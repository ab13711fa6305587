"""A plan held against the simulator: the same engines, the same load, step by step; where it falls short, more engines."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from forerun.plan.capacity import Routing
from forerun.plan.deployment_plan import DeploymentPlan
from forerun.plan.deployment_planner import (
    DEFAULTS,
    MS,
    PlanningOptions,
    describe,
    engine_model,
    speculations,
    speculative_config,
    with_simulation,
)
from forerun.plan.fleet_plan import FleetAnswer, FleetPlan, FleetSearch
from forerun.plan.load import Load
from forerun.plan.profile import Profile
from forerun.plan.serving_policies import serving_policies
from forerun.plan.simulation.fleet import Fleet
from forerun.plan.simulation.profiled import PLAIN, ProfiledEngine, control_of, profiled_engine
from forerun.plan.simulation.requests import synthetic_requests
from forerun.plan.simulation.result import SimulationResult
from forerun.plan.sla import Sla

FEWEST_REQUESTS, MOST_REQUESTS = 500, 20_000
LIVES = 10  # times that all places turn over
PERCENTILES = (50, 95, 99)
DEVIATIONS = 2.0  # of a share that was counted, by which it may fall short by chance
MOST_ADDED = 8  # engines
ROUTING = {Routing.LEAST_REQUESTS: "least-requests", Routing.RANDOM: "random"}
"""The simulator's policy for what the formulas assume."""


def confirmed(
    profile: Profile,
    plan: DeploymentPlan,
    answer: FleetAnswer,
    options: PlanningOptions = DEFAULTS,
    *,
    seed: int = 0,
    num_requests: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[DeploymentPlan, FleetAnswer]:
    """The plan with what the simulator says of it; with more engines, up to 8, where that is not enough.

    An infeasible plan is simulated as it is. `num_requests` None: as many as turn all places over ten times.

    Raises:
        ConfigError: the profile's traces are damaged.
    """
    load, sla, added = plan.load, plan.sla, 0
    engine = engine_model(profile)
    policies = serving_policies(engine, [None, *speculations(profile, options)], load)
    while True:
        progress(f"simulating {answer.plan.num_engines} engines")
        result = simulated(profile, answer.plan, load, options, seed=seed, num_requests=num_requests)
        figures = _figures(result, sla, seed)
        attained, count = figures["attainment"], figures["num_requests"]
        margin = DEVIATIONS * math.sqrt(sla.attainment * (1.0 - sla.attainment) / count)
        falls_short = attained < sla.attainment - margin
        budget = options.most_engines or math.inf
        if not falls_short or not plan.feasible or added == MOST_ADDED or answer.plan.num_engines + 1 > budget:
            break
        search = FleetSearch(engine, load, sla, options.transfer, options.routing)
        answer = replace(answer, plan=search.best_of(policies, [answer.plan.layout], answer.plan.num_engines + 1))
        plan, added = describe(profile, load, sla, answer, options), added + 1
    warnings = []
    if added and not falls_short:
        warnings.append(f"the simulator asked for {added} more engine(s) than the formulas")
    if falls_short and plan.feasible:
        warnings.append(
            f"the simulator attains the SLA for {attained:.1%} of requests only, and the formulas for "
            f"{answer.plan.attainment:.1%}; give a larger budget"
        )
        plan = replace(plan, feasible=False, best_achievable=dict(figures))
    return with_simulation(plan, figures, warnings), answer


def simulated(
    profile: Profile,
    plan: FleetPlan,
    load: Load,
    options: PlanningOptions = DEFAULTS,
    *,
    seed: int = 0,
    num_requests: int | None = None,
) -> SimulationResult:
    """Simulate a fleet under its load: real scheduling and KV accounting, the profile's step times and drafts."""
    if num_requests is None:
        wanted = math.ceil(LIVES * plan.num_engines * max(1.0, plan.batch_size))
        num_requests = min(MOST_REQUESTS, max(FEWEST_REQUESTS, wanted))
    fleet = Fleet(
        replicas=plan.replicas,
        prefill_replicas=plan.prefill_replicas,
        routing=ROUTING[options.routing],
        transfer=options.transfer,
    )
    requests = synthetic_requests(load, num_requests, seed=seed)
    return planned_engine(profile, plan, options).simulate(requests, fleet=fleet, seed=seed)


def planned_engine(profile: Profile, plan: FleetPlan, options: PlanningOptions = DEFAULTS) -> ProfiledEngine:
    """An engine to simulate that is run as planned: its drafts, their lengths, its limit of running sequences."""
    speculation = plan.policy.speculation
    name = speculation.name if speculation else PLAIN
    found = profiled_engine(profile, name, kind=options.kind, max_num_seqs=plan.policy.max_num_seqs)
    if name in profile.served_steps:
        return found
    config = speculative_config(plan)
    return replace(found, make_control=lambda: control_of(config, found.longest))


def _figures(result: SimulationResult, sla: Sla, seed: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "attainment": result.attainment(sla),
        "num_requests": len(result.requests),
        "seed": seed,
        "goodput_requests_per_second": result.goodput(sla),
        "output_tokens_per_second": result.output_throughput,
        "acceptance_length": result.speculation.acceptance_length,
        "num_preemptions": result.num_preemptions,
    }
    for name in ("ttft", "tpot", "icl", "e2el"):
        values = result.latencies(name)
        if not values.num_values:
            continue
        found[f"{name}_mean_ms"] = values.mean * MS
        for percent in PERCENTILES:
            found[f"{name}_p{percent}_ms"] = values.percentile(percent) * MS
    return found
