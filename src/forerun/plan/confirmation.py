"""A plan held against the simulator: the same engines, the same load, step by step; where it falls short, more engines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from forerun.errors import ConfigError
from forerun.plan.deployment_plan import DeploymentPlan
from forerun.plan.deployment_planner import DEFAULTS, MS, PlanningOptions, describe, engine_model, speculative_config
from forerun.plan.drafting_choices import speculations
from forerun.plan.fleet_plan import FleetAnswer, FleetPlan, FleetSearch
from forerun.plan.load import Load
from forerun.plan.profile import PLAIN, Profile
from forerun.plan.serving_policies import serving_policies
from forerun.plan.simulation.fleet import Fleet
from forerun.plan.simulation.profiled import ProfiledEngine, control_of, profiled_engine
from forerun.plan.simulation.requests import synthetic_requests
from forerun.plan.simulation.result import SimulationResult, Values
from forerun.plan.sla import Sla

FEWEST_REQUESTS, MOST_REQUESTS = 500, 20_000
LIVES = 10  # times that all places turn over
PERCENTILES = (50, 95, 99)
DEVIATIONS = 2.0  # of a share that was counted, by which it may fall short by chance
MOST_ADDED = 8  # engines
SHORTER = "give a smaller isl_cv or osl_cv, or profile with a larger --max-model-len"


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
    """The plan with what the simulator says of it; with more engines, up to 8 and within the budget, where that is not enough.

    Where these do not help, the plan is infeasible, with as few of them as came as near to the SLA as any. An infeasible plan
    is simulated as it is. `num_requests` None: as many as turn all places over ten times.

    Raises:
        ConfigError: the profile's traces are damaged, or no request fits the engine's context.
    """
    load, sla = plan.load, plan.sla
    engine = engine_model(profile)
    allowed = speculations(profile, methods=options.methods, kind=options.kind, confidence=options.confidence)
    policies = serving_policies(engine, [None, *allowed], load)
    search = FleetSearch(engine, load, sla, options.transfer, options.routing)
    most = min(options.most_engines or math.inf, answer.plan.num_engines + MOST_ADDED)
    tried: list[_Tried] = []
    while True:
        progress(f"simulating {answer.plan.num_engines} engines")
        result = simulated(profile, answer.plan, load, options, seed=seed, num_requests=num_requests)
        tried.append(_Tried(plan, answer, _figures(result, sla, seed)))
        margin = DEVIATIONS * math.sqrt(sla.attainment * (1.0 - sla.attainment) / len(result.requests))
        is_enough = not plan.feasible or tried[-1].attainment >= sla.attainment - margin
        if is_enough or answer.plan.num_engines >= most:
            break
        answer = replace(answer, plan=search.best_of(policies, [answer.plan.layout], answer.plan.num_engines + 1))
        plan = describe(profile, load, sla, answer, options)
    added = len(tried) - 1
    if is_enough:
        found = tried[-1]
        warnings = [f"the simulator asked for {added} more engine(s) than the formulas"] if added else []
    else:
        found = _infeasible(tried, margin)
        is_budget_spent = most == options.most_engines and found.answer.plan is tried[-1].answer.plan
        cure = (
            "give a larger budget"
            if is_budget_spent
            else f"{added} more engines are not enough either; forerun simulate shows where time is lost"
        )
        warnings = [
            f"the simulator attains the SLA for {found.attainment:.1%} of requests only, and the formulas for "
            f"{found.answer.plan.attainment:.1%}; {cure}"
        ]
    warnings += _left_out(found, num_requests)
    plan = replace(found.plan, simulated=found.figures, warnings=(*found.plan.warnings, *warnings))
    return plan, found.answer


def _infeasible(tried: Sequence[_Tried], margin: float) -> _Tried:
    """Of plans that all fall short the one with the fewest engines that comes as near to the SLA as any, as infeasible."""
    nearest = max(one.attainment for one in tried)
    plan, answer, figures = next(one for one in tried if one.attainment >= nearest - margin)
    best = figures | {"needed_replicas": None, "limits_missed_when_idle": []}
    return _Tried(
        plan=replace(plan, feasible=False, best_achievable=best),
        answer=replace(answer, is_feasible=False, needed=None),
        figures=figures,
    )


class _Tried(NamedTuple):
    """So many engines, and what the simulator says of them."""

    plan: DeploymentPlan
    answer: FleetAnswer
    figures: dict[str, Any]

    @property
    def attainment(self) -> float:
        """The share of requests that attained the SLA."""
        return float(self.figures["attainment"])


def simulated(
    profile: Profile,
    plan: FleetPlan,
    load: Load,
    options: PlanningOptions = DEFAULTS,
    *,
    seed: int = 0,
    num_requests: int | None = None,
) -> SimulationResult:
    """Simulate a fleet under its load: real scheduling and KV accounting, the profile's step times and drafts.

    Of `num_requests` that are drawn those are left out that are longer than the engine's context, as a server refuses them.

    Raises:
        ConfigError: all of them are.
    """
    fleet = Fleet(
        replicas=plan.replicas,
        prefill_replicas=plan.prefill_replicas,
        routing=options.routing,
        transfer=options.transfer,
    )
    engine = planned_engine(profile, plan, options)
    drawn = synthetic_requests(load, _num_requests(plan, num_requests), seed=seed)
    longest = engine.settings.max_model_len
    fitting = [one for one in drawn if one.num_prompt_tokens + one.num_output_tokens <= longest]
    if not fitting:
        raise ConfigError(
            f"load: got {len(drawn)} requests in the simulator, each longer than the engine's context of {longest} tokens; {SHORTER}"
        )
    return engine.simulate(fitting, fleet=fleet, seed=seed)


def _num_requests(plan: FleetPlan, given: int | None) -> int:
    """How many are drawn; by default as many as turn all places over ten times, within bounds."""
    if given is not None:
        return given
    wanted = math.ceil(LIVES * plan.num_engines * max(1.0, plan.batch_size))
    return min(MOST_REQUESTS, max(FEWEST_REQUESTS, wanted))


def _left_out(tried: _Tried, num_requests: int | None) -> list[str]:
    """What is said of requests that were too long to be simulated."""
    num_drawn = _num_requests(tried.answer.plan, num_requests)
    num_left_out = num_drawn - tried.figures["num_requests"]
    if not num_left_out:
        return []
    return [
        f"{num_left_out} of {num_drawn} requests that the simulator drew are longer than the engine's context and were "
        f"left out, as a server refuses them; {SHORTER}"
    ]


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
    drafts = result.speculation
    # a prompt's own step has no draft, and none is predicted; where prompts are read apart, who decodes has one of them, too
    num_without = 2 if any(one.kind == "prefill" for one in result.replicas) else 1
    num_decoding = drafts.num_steps - sum(min(num_without, one.num_output_tokens) for one in result.requests)
    found: dict[str, Any] = {
        "attainment": result.attainment(sla),
        "num_requests": len(result.requests),
        "seed": seed,
        "goodput_requests_per_second": result.goodput(sla),
        "output_tokens_per_second": result.output_throughput,
        "acceptance_length": 1 + drafts.num_accepted_tokens / num_decoding if num_decoding else None,
        "num_preemptions": result.num_preemptions,
    }
    for name in ("ttft", "tpot", "icl", "e2el"):
        # icl is a request's mean, as it is predicted and promised, and not each of its gaps
        means = [one.icl for one in result.requests if not math.isnan(one.icl)]
        values = Values.of(means) if name == "icl" else result.latencies(name)
        if not values.num_values:
            continue
        found[f"{name}_mean_ms"] = values.mean * MS
        for percent in PERCENTILES:
            found[f"{name}_p{percent}_ms"] = values.percentile(percent) * MS
    return found
