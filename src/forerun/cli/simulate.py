"""`forerun simulate`: a profiled engine, or many of them, serve a load in virtual time."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from cyclopts import Group, Parameter
from rich.console import Console
from rich.table import Table

from forerun.cli.command import command
from forerun.cli.console import plain_console
from forerun.cli.options import REPORT, ReportOptions
from forerun.cli.simulate_options import FleetOptions, RequestOptions, SimulationResultOptions
from forerun.errors import ConfigError, ForerunError
from forerun.plan.profile import PLAIN, Profile, missing_points
from forerun.plan.simulation.fleet import Fleet
from forerun.plan.simulation.profiled import ProfiledEngine, recorded_requests
from forerun.plan.simulation.requests import SimulatedRequest, synthetic_requests, with_arrivals
from forerun.plan.simulation.traces import conversation_requests, read_trace
from forerun.plan.sla import Sla

if TYPE_CHECKING:
    from forerun.plan.simulation.result import SimulationResult

logger = logging.getLogger(__name__)

REQUESTS, FLEET, RESULT = RequestOptions(), FleetOptions(), SimulationResultOptions()


@command
def simulate(
    profile: Path,
    /,
    *,
    requests: Annotated[
        RequestOptions, Parameter(name="*", group=Group("Requests", sort_key=1), negative=())
    ] = REQUESTS,
    fleet: Annotated[FleetOptions, Parameter(name="*", group=Group("Engines", sort_key=2), negative=())] = FLEET,
    result: Annotated[
        SimulationResultOptions, Parameter(name="*", group=Group("Result", sort_key=3), negative=())
    ] = RESULT,
    seed: int = 0,
    report: ReportOptions = REPORT,
) -> None:
    """Serve a load with profiled engines in virtual time: the real scheduler and KV accounting, no model.

    Args:
        profile: A folder that "forerun profile" wrote.
        seed: Of everything random; the same seed gives the same bytes.

    Examples:
        forerun simulate PROFILE --load rate=4,isl=300,osl=120 --config suffix --sla ttft=500ms,itl=50ms
        forerun simulate PROFILE --trace mooncake.jsonl --replicas 16 --routing prefix
    """
    requests.check()
    if seed < 0:
        raise ConfigError(f"seed: got {seed}; must be 0 or more")
    if requests.prompt_class is not None and fleet.config == PLAIN:
        raise ConfigError(
            f"prompt_class: got {requests.prompt_class!r} with --config plain, which drafts nothing; it applies to the acceptance "
            "of a configuration of drafts: leave it out, or name one by --config"
        )
    sla = result.parsed_sla
    known = Profile.load(profile)
    if known.version_warning is not None:
        logger.warning("%s", known.version_warning)
    engine = fleet.engine(known, kind=requests.prompt_class)
    arriving = _requests(requests, known, engine, seed)
    found = _run(engine, arriving, fleet.fleet(known.kv_bytes_per_token), seed, keeps_chunks=result.save_chunks)
    warnings = [*_beyond_profile(known, fleet.config, engine), *requests.unseen_rates()]
    for one in warnings:
        logger.warning("%s", one)
    document = {
        "backend": "forerun simulate",
        "model_id": known.model,
        "config": fleet.config,
        "num_prompts": len(arriving),
        "request_rate": len(arriving) / (arriving[-1].arrival or float("inf")),
        "seed": seed,
        "warnings": warnings,
        **found.to_json(sla),
    }
    if result.save_result is not None:
        whole = document | found.records_to_json()
        result.save_result.write_text(json.dumps(whole) + "\n", encoding="utf-8")
    if result.plot is not None:
        from forerun.bench.simulation_picture import draw_simulation  # matplotlib: only when it is needed

        title = f"{known.model} on {known.machine}, simulated: {fleet.config}, {fleet.replicas} replica(s)"
        draw_simulation(found, title, result.plot, num_blocks=engine.settings.num_blocks, sla=sla)
    report.write(document, show=lambda: _show(found, sla, plain_console()))


def _requests(options: RequestOptions, profile: Profile, engine: ProfiledEngine, seed: int) -> list[SimulatedRequest]:
    """What arrives."""
    load = options.parsed_load
    if load is not None:
        return synthetic_requests(load, options.num_requests, seed=seed, pattern=options.pattern())
    if options.trace is not None:
        found = read_trace(options.trace, piece_size=options.piece_size)
        return with_arrivals(found, np.array([one.arrival for one in found]) / options.time_scale)
    times = options.pattern().times(options.num_requests, np.random.default_rng(seed))
    if options.recorded:
        if engine.trace is None:
            raise ConfigError(
                "recorded: the profile has no trace of drafts of this configuration; name another by --config"
            )
        return recorded_requests(engine.trace, times, kind=options.prompt_class, seed=seed)
    assert options.conversations is not None, "it was checked"
    model = options.tokenizer or profile.model
    longest = engine.settings.max_model_len
    return with_arrivals(_conversations(options.conversations, model, longest, len(times), seed), times)


def _conversations(path: Path, model: str, max_model_len: int, count: int, seed: int) -> list[SimulatedRequest]:
    """Requests of a file in ShareGPT's format, in random order, each once before any comes twice.

    Raises:
        ConfigError: there is no tokenizer to count their tokens with, or none of them fits.
    """
    from forerun.bench.sharegpt import read_conversations
    from forerun.models import store
    from forerun.models.tokenizer import load_tokenizer  # only when it is needed

    try:
        tokenizer = load_tokenizer(store.resolve_model(model))
    except ForerunError as error:
        raise ConfigError(
            f"conversations: no tokenizer counts their tokens ({error}); name the model as it is called here by --tokenizer"
        ) from error
    found = conversation_requests(read_conversations(path), tokenizer.encode, max_model_len=max_model_len)
    order = np.concatenate(
        [np.random.default_rng((seed, turn)).permutation(len(found)) for turn in range(-(-count // len(found)))]
    )
    return [found[number] for number in order[:count].tolist()]


def _run(
    engine: ProfiledEngine, requests: list[SimulatedRequest], fleet: Fleet, seed: int, *, keeps_chunks: bool
) -> SimulationResult:
    """Simulate, with a progress bar on a terminal."""
    from tqdm import tqdm

    with tqdm(total=len(requests), unit="req", disable=not sys.stderr.isatty()) as bar:

        def progress(num_ended: int) -> None:
            bar.update(num_ended - bar.n)

        return engine.simulate(
            requests,
            fleet=fleet,
            seed=seed,
            keeps_chunks=keeps_chunks,
            progress=progress,
        )


def _beyond_profile(profile: Profile, config: str, engine: ProfiledEngine) -> list[str]:
    """What to tell a user where the steps of a simulation were larger than any that was measured."""
    beyond = missing_points(profile.steps_of(None if config == PLAIN else config), **asdict(engine.largest))
    return [f"not measured: {one}; profile further for a sure answer" for one in beyond]


def _show(found: SimulationResult, sla: Sla | None, console: Console) -> None:
    """Print the figures as two tables."""
    console.print(
        f"{len(found.requests)} requests in {found.seconds:.1f} s: {found.request_throughput:.2f} requests/s, "
        f"{found.output_throughput:.0f} output tokens/s"
    )
    if sla is not None:
        share = found.attainment(sla)
        enough = "as many as" if share >= sla.attainment else "fewer than"
        console.print(
            f"{share:.1%} keep all limits, {enough} the SLA asks for ({sla.attainment:.0%}): "
            f"goodput {found.goodput(sla):.2f} requests/s"
        )
    console.print(_latencies(found))
    console.print(_replicas(found))
    length = found.speculation.acceptance_length
    if found.speculation.num_drafts and length is not None:
        console.print(
            f"{length:.2f} tokens per step of a sequence; {found.speculation.acceptance_rate:.1%} of drafted tokens stood"
        )
    if found.energy_joules is not None:
        console.print(f"{found.energy_joules / found.num_output_tokens:.3g} J per output token")


def _latencies(found: SimulationResult) -> Table:
    table = Table(title="latencies, ms")
    for name in ("", "mean", "p50", "p90", "p95", "p99"):
        table.add_column(name, justify="right" if name else "left")
    rows: dict[str, Any] = {"TTFT": "ttft", "TPOT": "tpot", "between chunks": "itl", "end to end": "e2el"}
    for title, name in rows.items():
        values = found.latencies(name)
        cells = [values.mean, *(values.percentile(percent) for percent in (50, 90, 95, 99))]
        table.add_row(title, *(f"{1e3 * cell:.1f}" for cell in cells))
    return table


def _replicas(found: SimulationResult) -> Table:
    table = Table(title="engines")
    for name in ("", "busy", "running", "KV used", "KV peak", "preemptions", "prompts cached"):
        table.add_column(name, justify="right" if name else "left", no_wrap=not name)
    for number, one in enumerate(found.replicas):
        num_prompt = one.num_prompt_tokens + one.num_cached_tokens
        table.add_row(
            f"{one.kind} {number}",
            f"{one.busy_seconds / found.seconds:.0%}",
            f"{one.num_running:.1f}",
            f"{one.kv_usage:.0%}",
            f"{one.peak_kv_usage:.0%}",
            str(one.num_preemptions),
            f"{one.num_cached_tokens / num_prompt:.0%}" if num_prompt else "-",
        )
    return table
