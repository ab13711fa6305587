"""From a profile, a load and an SLA to a deployment plan: the engine, the ways to draft, the fleet, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from forerun.errors import ConfigError
from forerun.plan.capacity import Routing, max_rate, predict
from forerun.plan.corrections import NO_CORRECTIONS, AppliedCorrections, with_drafted
from forerun.plan.deployment_plan import DeploymentPlan, Layout, PlannedEngine
from forerun.plan.draft_lengths import Speculation
from forerun.plan.drafter_memory import drafter_memory
from forerun.plan.drafting_choices import speculations
from forerun.plan.fleet_plan import (
    FREE_TRANSFER,
    MOST_REPLICAS,
    FleetAnswer,
    FleetPlan,
    FleetSearch,
    kept_engines,
    plan_fleet,
)
from forerun.plan.load import Load
from forerun.plan.profile import NAMES, SCHEDULE, Profile, missing_points
from forerun.plan.serving_policies import EngineModel, mean_context, serving_policies
from forerun.plan.simulation.fleet import Transfer
from forerun.plan.sla import LATENCIES, Sla

BUSY = 0.9
"""Utilization above which small errors of the profile make large ones of waiting: worth a warning."""

SIZED = ("draft_tree", "drafters", "synthetic_acceptance_rates", "synthetic_acceptance_length")
"""Keys with sizes that `num_speculative_tokens` must have room for."""

QUANTILES = (0.5, 0.95, 0.99)
IDLE_RATE = 1e-6  # requests per second of an engine that has nothing else to do
MS = 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningOptions:
    """What a plan may use, and what is known beside the profile.

    Attributes:
        layouts: those that may be chosen.
        most_engines: the budget; None: as many as it takes.
        kind: the class of prompts whose acceptance counts; None: all.
        confidence: acceptance is planned at the lower end of its interval; None: as measured.
        methods: the configurations that may be chosen; None: all of the profile.
        transfer: what handing over a prompt's KV takes.
        routing: which engine a request is sent to.
        corrections: those that the profile was given, to be shown with the plan.
    """

    layouts: tuple[Layout, ...] = (Layout.AGGREGATED,)
    most_engines: int | None = None
    kind: str | None = None
    confidence: float | None = None
    methods: tuple[str, ...] | None = None
    transfer: Transfer = FREE_TRANSFER
    routing: Routing = Routing.LEAST_REQUESTS
    corrections: AppliedCorrections = NO_CORRECTIONS


DEFAULTS = PlanningOptions()


def corrected(
    profile: Profile, *, time_factor: float, acceptance_factor: float, methods: Sequence[str] | None = None
) -> Profile:
    """The profile as a running service was observed: steps take so many times as long, and drafts add so many times as much to them.

    Recorded drafts no longer hold where acceptance is another; simulations then draw from the rates.

    Args:
        profile: as it was measured.
        time_factor: observed over profiled seconds of a step, drafting included.
        acceptance_factor: observed over profiled tokens that drafts add to a step; none adds more than it has places.
        methods: the configurations whose acceptance is corrected; None: all.

    Raises:
        ConfigError: the time factor is not above 0, or that of acceptance below 0.
    """
    if not 0.0 < time_factor < math.inf:
        raise ConfigError(f"time_factor: got {time_factor:g}; must be a finite number above 0")
    if not 0.0 <= acceptance_factor < math.inf:
        raise ConfigError(f"acceptance_factor: got {acceptance_factor:g}; must be a finite number, at least 0")
    if time_factor != 1.0:
        served = {
            name: one.scaled(memory=time_factor, arithmetic=time_factor) for name, one in profile.served_steps.items()
        }
        step_times = profile.step_times.scaled(memory=time_factor, arithmetic=time_factor)
        drafting = {name: one.scaled(time_factor) for name, one in profile.drafting.items()}
        profile = replace(profile, step_times=step_times, served_steps=served, drafting=drafting)
    if acceptance_factor != 1.0:
        chosen = profile.configs if methods is None else methods
        changed = {
            name: with_drafted(one, acceptance_factor) if name.split("/")[0] in chosen else one
            for name, one in profile.acceptance.items()
        }
        traces = {name: path for name, path in profile.traces.items() if name not in chosen}
        profile = replace(profile, acceptance=changed, traces=traces)
    return profile


def engine_model(profile: Profile) -> EngineModel:
    """The profile's engine."""
    return EngineModel(
        step_times=profile.step_times,
        num_blocks=profile.num_blocks,
        block_size=profile.block_size,
        max_num_seqs=profile.max_num_seqs,
        max_num_batched_tokens=profile.max_num_batched_tokens,
        max_model_len=profile.max_model_len,
        has_plain_steps=profile.has_plain_steps,
    )


def plan_deployment(
    profile: Profile, load: Load, sla: Sla, options: PlanningOptions = DEFAULTS
) -> tuple[DeploymentPlan, FleetAnswer]:
    """Plan for a load: what to run, and the fleet that it was read from.

    Raises:
        ConfigError: the load does not fit the profile's engine, or an option is out of range.
    """
    answer = plan_engines(profile, load, sla, options)
    return describe(profile, load, sla, answer, options), answer


def plan_engines(profile: Profile, load: Load, sla: Sla, options: PlanningOptions = DEFAULTS) -> FleetAnswer:
    """The engines alone, without the record of what is predicted of them.

    Raises:
        ConfigError: as `plan_deployment`.
    """
    return plan_fleet(
        engine_model(profile),
        speculations(profile, methods=options.methods, kind=options.kind, confidence=options.confidence),
        load,
        sla,
        layouts=options.layouts,
        most_engines=options.most_engines,
        transfer=options.transfer,
        routing=options.routing,
    )


def with_running(
    profile: Profile, plan: DeploymentPlan, answer: FleetAnswer, options: PlanningOptions, running: int
) -> tuple[DeploymentPlan, FleetAnswer]:
    """The plan with as many of the engines that run now as should stay, within the budget; an infeasible one as it is.

    See `kept_engines`.
    """
    planned = answer.plan
    running = min(running, options.most_engines or running)
    if not answer.is_feasible or running <= planned.num_engines:
        return plan, answer
    search = FleetSearch(engine_model(profile), plan.load, plan.sla, options.transfer, options.routing)

    def with_count(count: int) -> FleetPlan:
        added = count - planned.num_engines
        share = round(added * planned.prefill_replicas / planned.num_engines)
        return search.at(planned.policy, planned.prefill_replicas + share, planned.replicas + added - share)

    kept = kept_engines(
        planned.num_engines, running=running, busy_share=lambda count: with_count(count).busiest_utilization
    )
    if kept == planned.num_engines:
        return plan, answer
    answer = replace(answer, plan=with_count(kept))
    return describe(profile, plan.load, plan.sla, answer, options), answer


def describe(
    profile: Profile, load: Load, sla: Sla, answer: FleetAnswer, options: PlanningOptions = DEFAULTS
) -> DeploymentPlan:
    """The plan as a record, with what is predicted and what is to be known of it."""
    plan, engine = answer.plan, engine_model(profile)
    speculation = plan.policy.speculation
    predicted = predictions(plan, load, engine, sla, options.routing) | {
        "joules_per_output_token": joules_per_token(profile, plan, load)
    }
    return DeploymentPlan(
        model=profile.model,
        profile={name: getattr(profile, name) for name in NAMES}
        | {"gigabytes_per_second": profile.gigabytes_per_second},
        load=load,
        sla=sla,
        feasible=answer.is_feasible,
        best_achievable=None if answer.is_feasible else _shortfall(answer, predicted, engine, load, sla),
        layout=plan.layout,
        replicas=plan.num_engines,
        prefill_replicas=plan.prefill_replicas,
        decode_replicas=plan.replicas if plan.prefill_replicas else 0,
        engine=PlannedEngine(
            max_num_seqs=plan.policy.max_num_seqs,
            max_num_batched_tokens=profile.max_num_batched_tokens,
            max_model_len=engine.beside(speculation).max_model_len,
            block_size=profile.block_size,
            dtype=profile.dtype,
            quantization=profile.quantization,
            tensor_parallel_size=profile.tensor_parallel_size,
            device=profile.device,
            kernel_settings=dict(profile.kernel_settings),
        ),
        speculative_config=speculative_config(plan),
        acceptance=None if speculation is None else speculation.acceptance.to_json(**profile.conditions),
        predicted=predicted,
        corrections=None if options.corrections.changes_nothing else options.corrections.to_json(),
        warnings=(*_reasons(answer, options), *_warnings(profile, plan, load)),
    )


def speculative_config(plan: FleetPlan) -> dict[str, Any] | None:
    """What each engine is given: the profiled configuration with the planned K, by batch size where that differs.

    A configuration that chooses its draft lengths while it runs is left as it is. Of one that has parts of a certain
    size, or is planned whole or not at all, `num_speculative_tokens` stays as it was, since the engine refuses less;
    what is planned is then in the schedule alone. One that a server ran is left as it is, too.
    """
    speculation = plan.policy.speculation
    if speculation is None:
        return None
    config = dict(speculation.speculative_config)
    if speculation.is_adaptive or speculation.step_times is not None:
        return config
    schedule, longest = plan.policy.schedule, plan.policy.max_draft_tokens
    config.pop(SCHEDULE, None)
    if speculation.is_whole:
        if len(schedule) > 1:
            config[SCHEDULE] = [[first, last, length and speculation.whole_nodes] for first, last, length in schedule]
        return config
    if all(config.get(key) is None for key in SIZED):
        config["num_speculative_tokens"] = longest
    if len(schedule) > 1 or longest != config.get("num_speculative_tokens"):
        config[SCHEDULE] = [list(entry) for entry in schedule]
    return config


def predictions(plan: FleetPlan, load: Load, engine: EngineModel, sla: Sla, routing: Routing) -> dict[str, Any]:
    """What requests will see: milliseconds in keys that end in _ms; None: without end."""
    found: dict[str, Any] = {"attainment": plan.attainment}
    for name in LATENCIES:
        latency = getattr(plan, name)
        found[f"{name}_mean_ms"] = _finite(float(latency.mean[0]) * MS)
        for share in QUANTILES:
            found[f"{name}_p{round(share * 100)}_ms"] = _finite(float(latency.quantile(share)[0]) * MS)
    found |= {
        "goodput_requests_per_second": load.rate * plan.attainment,
        "output_tokens_per_second": load.tokens_per_second,
        "batch_size": plan.batch_size,
        "acceptance_length": plan.acceptance_length,
        "utilization": plan.utilization,
    }
    if plan.prefill_replicas:
        found["prefill_utilization"] = plan.prefill_utilization
    else:
        found["max_requests_per_second"] = plan.replicas * max_rate(
            engine, plan.policy, load, sla, num_engines=plan.replicas, routing=routing
        )
    return found


def joules_per_token(profile: Profile, plan: FleetPlan, load: Load) -> float | None:
    """Energy of an output token, idle engines included; None where the profile has no power."""
    if profile.watts is None:
        return None
    busy = plan.replicas * plan.busy_share + plan.prefill_replicas * min(1.0, plan.prefill_utilization or 0.0)
    watts = busy * profile.watts + (plan.num_engines - busy) * (profile.idle_watts or 0.0)
    return watts / load.tokens_per_second


def _shortfall(
    answer: FleetAnswer, predicted: Mapping[str, Any], engine: EngineModel, load: Load, sla: Sla
) -> dict[str, Any]:
    """What the best plan reaches, how many engines would be enough, and which limits no engine keeps."""
    keys = ["attainment", *(f"{name}_{what}_ms" for name in LATENCIES for what in ("mean", "p95"))]
    reached = {key: predicted[key] for key in keys}
    return reached | {
        "needed_replicas": answer.needed,
        "limits_missed_when_idle": _missed_when_idle(engine, answer, load, sla),
    }


def _missed_when_idle(engine: EngineModel, answer: FleetAnswer, load: Load, sla: Sla) -> list[str]:
    """Limits that an engine misses although it has nothing else to do, with what it takes; of all ways to run it the best."""
    if answer.needed is not None:
        return []
    tried = {-1: answer.plan.policy}
    for policy in serving_policies(engine, [answer.plan.policy.speculation], load):
        tried.setdefault(int(policy.lengths[0]), policy)  # one request runs: what is drafted for it is all that counts
    alone = [predict(engine, policy, load, np.array([IDLE_RATE])) for policy in tried.values()]
    missed = []
    for name in LATENCIES:
        limit = getattr(sla, name)
        if limit is None:
            continue
        least = min(float(getattr(one, name).quantile(sla.attainment)[0]) for one in alone)
        if least > limit:
            missed.append(f"{name}: an idle engine takes {least * MS:.3g} ms, the limit is {limit * MS:.3g} ms")
    return missed


def _reasons(answer: FleetAnswer, options: PlanningOptions) -> list[str]:
    """Why an infeasible plan has as many engines as it has, where no number is enough."""
    if answer.is_feasible or answer.needed is not None:
        return []
    most = max(MOST_REPLICAS, options.most_engines or 0)
    if not answer.plan.is_stable:
        return [f"the load is more than {most} engines, the most that are tried, can take"]
    return [f"no number of engines up to {most} attains the SLA; these are as many as bring anything"]


def _warnings(profile: Profile, plan: FleetPlan, load: Load) -> list[str]:
    policy = plan.policy
    found = [] if profile.version_warning is None else [profile.version_warning]
    usual = min(policy.max_num_seqs, math.ceil(plan.batch_size + 2.0 * math.sqrt(plan.batch_size)) or 1)
    drafted = policy.speculation.nodes_of(int(policy.lengths[usual - 1])) if policy.speculation else 0
    for beyond in missing_points(
        profile.steps_of(policy.speculation.name if policy.speculation else None),
        num_rows=usual * (1 + drafted),
        num_sequences=usual,
        num_context_tokens=round(usual * mean_context(load)),
        prompt_rows=round(min(load.computed_isl, profile.max_num_batched_tokens)),
    ):
        found.append(f"not measured: {beyond}; profile further for a sure answer")
    if BUSY < plan.busiest_utilization < 1.0:
        found.append(
            f"engines are {plan.busiest_utilization:.0%} busy: a few percent more load or time makes long queues"
        )
    if policy.speculation is not None:
        found += _drafting_warnings(profile, plan, policy.speculation)
    if policy.max_num_seqs < profile.max_num_seqs:
        found.append(
            f"max_num_seqs is {policy.max_num_seqs}, below the profile's {profile.max_num_seqs}: more would be slower or not fit"
        )
    if load.prefix_hit_rate:
        shared = engine_model(profile).shared_blocks(load)
        found.append(
            f"the prefix hit rate is taken for one beginning that all prompts share, whose {shared} KV blocks each engine holds "
            "once; with several such beginnings, or those of conversations, fewer sequences fit"
        )
    return found


def _drafting_warnings(profile: Profile, plan: FleetPlan, speculation: Speculation) -> list[str]:
    if speculation.name in profile.served_steps:
        return [f"{speculation.name} is planned as the server ran it: how it drafts otherwise was not measured"]
    policy, found = plan.policy, []
    if not speculation.is_adaptive:
        if speculation.is_whole:
            found.append(
                f"drafts of {speculation.name} are planned as they were measured, or not at all: what parts of these trees "
                "yield and cost is not known"
            )
        elif policy.max_draft_tokens == speculation.max_draft_tokens:
            found.append(
                f"K = {policy.max_draft_tokens} is the longest draft that was profiled; longer ones may be better still"
            )
        if plan.prefill_replicas and len(policy.schedule) > 1:
            found.append("K follows the batch size of each decode engine; prefill engines draft nothing")
    return found + (_memory_warnings(profile, speculation) if profile.device == "cuda" else [])


def _memory_warnings(profile: Profile, speculation: Speculation) -> list[str]:
    """What the planned drafter leaves of a GPU's memory, and what is not known of that."""
    drafter = drafter_memory(profile, speculation.speculative_config)
    found = [f"a GPU's memory is planned without {what}: there may be fewer KV blocks" for what in drafter.unknown]
    if speculation.num_blocks != profile.num_blocks:
        found.append(
            f"beside the drafter of {speculation.name} and its KV an engine has {speculation.num_blocks} of the profile's "
            f"{profile.num_blocks} KV blocks"
        )
    return found


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
