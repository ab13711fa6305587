"""`forerun plan`: how many engines a load needs, which drafts, how many tokens of them, for an SLA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter
from rich.console import Console
from rich.table import Table

from forerun.cli.command import command
from forerun.cli.console import plain_console, status
from forerun.cli.options import REPORT, ReportOptions
from forerun.cli.plan_options import (
    CHOICE,
    CONFIRMATION,
    REPLAY,
    ChoiceOptions,
    ConfirmationOptions,
    ReplayOptions,
)
from forerun.core.writable import check_writable_folder
from forerun.errors import ConfigError
from forerun.plan.confirmation import confirmed
from forerun.plan.day_confirmation import confirmed_days
from forerun.plan.day_plan import DayPlan, SimulatedDay
from forerun.plan.day_replay import DayReplay, Interval, intervals_of, replay_day, replay_notes
from forerun.plan.deployment_plan import DeploymentPlan, Layout
from forerun.plan.deployment_planner import (
    PlanningOptions,
    corrected,
    engine_model,
    plan_deployment,
    with_running,
)
from forerun.plan.fleet_plan import FleetPlan
from forerun.plan.load import Load, parse_given_load
from forerun.plan.profile import SCHEDULE, Profile, chooses_lengths
from forerun.plan.simulation.requests import SimulatedRequest, check_requests
from forerun.plan.simulation.traces import read_trace
from forerun.plan.sla import LATENCIES, Sla, parse_sla

MOST_PERCENT = 10.0
"""Utilization from which on it is no share any more."""


@command
def plan(
    profile: Path,
    /,
    *,
    sla: str,
    load: str | None = None,
    output: Path | None = None,
    choice: Annotated[ChoiceOptions, Parameter(name="*", group=Group("Choice", sort_key=1))] = CHOICE,
    confirmation: Annotated[
        ConfirmationOptions, Parameter(name="*", group=Group("Confirmation", sort_key=3))
    ] = CONFIRMATION,
    day: Annotated[ReplayOptions, Parameter(name="*", group=Group("A day of traffic", sort_key=4))] = REPLAY,
    report: ReportOptions = REPORT,
) -> int:
    """Plan a deployment: engines, drafts and their lengths, for a load and an SLA. Exits with 1 where none is enough.

    Args:
        profile: A folder that "forerun profile" wrote.
        sla: Limits and the share of requests that must keep them, e.g. "ttft=500ms,itl=50ms,attainment=0.95"; also icl, e2el.
        load: What arrives, e.g. "rate=20,isl=3000,osl=300": requests per second, tokens of prompts and of answers; also
            isl_cv, osl_cv, cv or burstiness, prefix_hit_rate. By default the busiest interval of --replay.
        output: Write plan.json into this folder, for "forerun emit".

    Examples:
        forerun plan profile --sla ttft=500ms,itl=50ms --load rate=20,isl=3000,osl=300
        forerun plan profile --sla ttft=1s,itl=20ms --load rate=5,isl=800,osl=200 --budget 8 --confirm --output plan
        forerun plan profile --sla ttft=1s,itl=20ms --load rate=5,isl=800,osl=200 --observed test.json
        forerun plan profile --sla ttft=2s,itl=50ms --replay day.jsonl --picture day.svg
        forerun plan profile --sla ttft=2s,itl=50ms --replay day.jsonl --predictor kalman --confirm
    """
    check_writable_folder("--output", output)
    wanted = parse_sla(sla)
    given = None if load is None else parse_given_load(load)
    requests = [] if day.replay is None else read_trace(day.replay)
    measured = Profile.load(profile)
    if requests:
        check_requests(requests, max_model_len=measured.max_model_len)
    hit_rate = None if given is None else given.named_hit_rate
    intervals = intervals_of(requests, day.interval, prefix_hit_rate=hit_rate) if requests else []
    arriving = _busiest(intervals) if given is None else given.load
    with status() as progress:
        learnt = choice.correction.of(measured, choice.prompt_class, progress)
        known = corrected(
            measured,
            time_factor=learnt.time_factor,
            acceptance_factor=learnt.acceptance_factor,
            methods=choice.method or None,
        )
        options = replace(choice.planning(known), corrections=learnt)
        progress("planning")
        found, answer = plan_deployment(known, arriving, wanted, options)
        if choice.running is not None:
            found, answer = with_running(known, found, answer, options, choice.running)
        if confirmation.confirm:
            found, answer = confirmed(
                known,
                found,
                answer,
                options,
                seed=confirmation.seed,
                num_requests=confirmation.num_requests,
                progress=progress,
            )
        progress("replaying the day")
        days = _replay(known, answer.plan, wanted, options, requests, intervals, day)
        if confirmation.confirm and days:
            days = confirmed_days(
                known, answer.plan, days, requests, wanted, options, seed=confirmation.seed, progress=progress
            )
    if days:
        notes = replay_notes(requests, intervals, day.predictors, period=day.period)
        found = replace(found, warnings=(*found.warnings, *notes))
    if output is not None:
        found.save(output)
    if day.picture is not None:
        from forerun.bench.day_picture import draw_days  # matplotlib: only when it is needed

        draw_days(days, f"{known.model} on {known.machine}: {sla}", wanted, day.picture)
    report.write(
        found.to_json() | ({"days": [one.to_json() for one in days]} if days else {}),
        show=lambda: _show(found, days, plain_console()),
    )
    return 0 if found.feasible else 1


def _busiest(intervals: list[Interval]) -> Load:
    """The load of the busiest interval.

    Raises:
        ConfigError: there is none.
    """
    loads = [one.load for one in intervals if one.load is not None]
    if not loads:
        raise ConfigError("load: missing; give --load, e.g. rate=20,isl=3000,osl=300, or --replay with a trace")
    return max(loads, key=lambda one: one.rate * (one.isl + one.osl))


def _replay(
    profile: Profile,
    planned: FleetPlan,
    sla: Sla,
    options: PlanningOptions,
    requests: list[SimulatedRequest],
    intervals: list[Interval],
    day: ReplayOptions,
) -> list[DayPlan]:
    if not intervals:
        return []
    replay = DayReplay(
        engine_model(profile),
        planned.policy,
        sla,
        prefill_share=planned.prefill_replicas / planned.num_engines,
        most_engines=options.most_engines,
        transfer=options.transfer,
        routing=options.routing,
    )
    check_requests(requests, max_model_len=replay.longest)  # which a drafter may have made shorter, on a GPU
    return replay_day(replay, intervals, day.predictors, period=day.period)


def _show(found: DeploymentPlan, days: list[DayPlan], console: Console) -> None:
    """Print the plan: what to run, what requests will see, what is to be known; and the days that were replayed."""
    target = f"{100 * found.sla.attainment:g}% of requests within the SLA"
    if not found.feasible:
        console.print(f"INFEASIBLE: {target} cannot be had; this is the best that can be done:", style="bold red")
    for name, value in _settings(found):
        console.print(f"{name + ':':<14}{value}")
    console.print(_latencies(found))
    for missed in (found.best_achievable or {}).get("limits_missed_when_idle", ()):
        console.print(f"no number of engines is enough: {missed}")
    needed = (found.best_achievable or {}).get("needed_replicas")
    if needed is not None:
        console.print(f"{needed} engines would be enough; give a larger --budget")
    for warning in found.warnings:
        console.print(f"note: {warning}")
    if days:
        console.print(_days_table(days))


def _settings(found: DeploymentPlan) -> list[tuple[str, str]]:
    engines = f"{found.replicas}, each for whole requests"
    if found.layout is Layout.DISAGGREGATED:
        engines = f"{found.prefill_replicas} for prompts, {found.decode_replicas} for answers"
    predicted, corrections, load = found.predicted, found.corrections, found.load
    return [
        ("load", f"{load.rate:.3g} requests per second, {load.isl:.4g} + {load.osl:.4g} tokens"),
        *([("corrected", _corrected(corrections))] if corrections else []),
        ("engines", engines),
        ("drafts", _drafts(found)),
        ("sequences", f"{found.engine.max_num_seqs} at most, {predicted['batch_size']:.1f} on average"),
        ("busy", _busy(predicted)),
        ("within SLA", f"{predicted['attainment']:.1%} of requests by the formulas" + _simulated_share(found)),
    ]


def _busy(predicted: Mapping[str, Any]) -> str:
    """How busy engines are; where prompts are computed apart, each kind of them."""
    busy = f"{_of_most(predicted['utilization'])} what they can do"
    if "prefill_utilization" not in predicted:
        return busy
    return f"those for prompts {_of_most(predicted['prefill_utilization'])}, those for answers {busy}"


def _of_most(utilization: float) -> str:
    return f"{utilization:.0%} of" if utilization < MOST_PERCENT else f"{utilization:.3g} times"


def _corrected(corrections: Mapping[str, Any]) -> str:
    source = f", learnt from {', '.join(corrections['learnt_from'])}" if corrections["learnt_from"] else ""
    return (
        f"a step takes {corrections['time_factor']:.3g} times as long as profiled, and drafts add "
        f"{corrections['acceptance_factor']:.3g} times as many tokens to it{source}"
    )


def _drafts(found: DeploymentPlan) -> str:
    config = found.speculative_config
    if config is None:
        return "none: they would not pay"
    name = config.get("method", config.get("model"))  # by which the method is known, too
    if chooses_lengths(config):
        return f"{name}, which chooses its lengths while it runs"
    if "num_speculative_tokens" not in config:
        return f"{name}, as it was profiled"
    whole = [[1, found.engine.max_num_seqs, config["num_speculative_tokens"]]]
    lengths = [
        f"{number} at {first}-{last} sequences" if last > first else f"{number} at {first}"
        for first, last, number in config.get(SCHEDULE, whole)
    ]
    return f"{name}, K = {', '.join(lengths)}"


def _simulated_share(found: DeploymentPlan) -> str:
    if found.simulated is None:
        return "; --confirm asks the simulator"
    return f", {found.simulated['attainment']:.1%} of {found.simulated['num_requests']} in the simulator"


def _latencies(found: DeploymentPlan) -> Table:
    table = Table("ms", box=None, header_style="bold")
    sources = {"": found.predicted} | ({"sim. ": found.simulated} if found.simulated else {})
    for label in sources:
        for what in ("mean", "p50", "p95", "p99"):
            table.add_column(f"{label}{what}", justify="right")
    table.add_column("limit", justify="right")
    for name in LATENCIES:
        limit = getattr(found.sla, name)
        cells = [
            _milliseconds(figures[key]) if (key := f"{name}_{what}_ms") in figures else "-"  # of answers of one token
            for figures in sources.values()
            for what in ("mean", "p50", "p95", "p99")
        ]
        table.add_row(name.upper(), *cells, "" if limit is None else f"{limit * 1e3:g}")
    return table


def _milliseconds(value: Any) -> str:
    return "without end" if value is None else f"{value:.3g}" if value < 100.0 else f"{value:.0f}"


def _days_table(days: list[DayPlan]) -> Table:
    """A row for each way to decide, by the formulas, and one below it for what the simulator says, where it was asked."""
    table = Table("the day by", box=None, header_style="bold")
    for name in ("engine hours", "within SLA", "worst interval", "changes", "error of the rate"):
        table.add_column(name, justify="right")
    for one in days:
        table.add_row(one.name, *_outcome(one), str(one.num_changes), f"{one.rate_error:.1%}")
        if one.simulated is not None:
            table.add_row("  simulated", *_outcome(one.simulated))
    return table


def _outcome(found: DayPlan | SimulatedDay) -> tuple[str, str, str]:
    return f"{found.engine_hours:.1f}", f"{found.attainment:.1%}", f"{found.worst:.1%}"
