"""`forerun tune`: the best speculative configuration for given prompts at a given load."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

import forerun
from forerun.bench.workloads import check_temperature
from forerun.cli import loading
from forerun.cli.command import command
from forerun.cli.console import plain_console, status
from forerun.cli.input_files import read_configs, read_prompts
from forerun.cli.interruption import resumable
from forerun.cli.options import SPECULATIVE_OPTIONS, EngineOptions, Flag, JsonFlag, Words
from forerun.errors import ConfigError
from forerun.plan.profile import PROFILE_FILE

if TYPE_CHECKING:
    from forerun.bench.tuning.estimate import Estimate
    from forerun.bench.tuning.folder import TuningFolder
    from forerun.bench.tuning.tuner import TuningSettings
    from forerun.config.settings import EngineSettings
    from forerun.models.base import LoadedTarget
    from forerun.plan.deployment_plan import PlannedEngine
    from forerun.plan.tuning.candidates import BatchLimits, Candidate, SearchSpace
    from forerun.plan.tuning.offered_load import OfferedLoad
    from forerun.plan.tuning.tuning_report import TuningReport

ENGINE = EngineOptions()
DEFAULT_LOAD = "concurrency=1"

OF_THE_SPACE = ("model", "max_num_seqs", "max_num_batched_tokens", "quantization", *SPECULATIVE_OPTIONS)
"""Settings of the engine of which a tuning's folder says by other names what is tried."""

Counts = Annotated[list[int], Parameter(consume_multiple=True, negative=())]


@Parameter(name="*", group=Group("Workload", sort_key=1))
@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """What is served, and what is promised."""

    load: str = DEFAULT_LOAD
    """How requests come: rate=2 per second, with burstiness=0.5 or cv=1.4 in bursts, or concurrency=4 clients."""
    goodput: Words = None
    """Goals in milliseconds, e.g. ttft:500 tpot:50 e2el:5000, or guidellm's ttft_ms=500 target_attainment=0.95."""
    objective: Literal["throughput", "latency", "goodput", "energy"] | None = None
    """What is to be best; by default goodput where there are goals, throughput for clients, latency at a rate."""
    num_prompts: int | None = None
    """The first prompts of the file; all if it is left out."""
    max_tokens: int = 256
    """Tokens of each answer, at most."""
    temperature: float = 0.0
    """0 always takes the most likely token; above it each prompt is sampled with its number as the seed."""

    def __post_init__(self) -> None:
        for name in ("num_prompts", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')}: got {value}; must be 1 or more")
        check_temperature("--temperature", self.temperature)
        if self.objective == "goodput" and self.goodput is None:
            raise ConfigError("--objective: got goodput without goals; give --goodput, e.g. ttft:500 tpot:50")


@Parameter(name="*", group=Group("Search", sort_key=2))
@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """What may be chosen, and how often it is run."""

    configs: Path | None = None
    """A file of ways to draft: names with a speculative_config each, instead of the built-in ones."""
    try_max_num_seqs: Counts | None = None
    """Further values of --max-num-seqs to try; by default a quarter of it, where the load may fill it."""
    try_max_num_batched_tokens: Counts | None = None
    """Further values of --max-num-batched-tokens to try; by default a quarter of it, where the load may fill it."""
    try_quantization: Words = None
    """Further formats of the weights to try, e.g. int8. They change the texts."""
    rounds: int = 3
    """Real runs of each of the best, in turn; what is clearly behind is left out of later ones."""
    finalists: int = 3
    """Configurations that are run, at most; auto and plain decoding come on top."""
    profile: Path | None = None
    """A folder of "forerun profile" for this model: its step times are taken instead of measured ones."""

    def __post_init__(self) -> None:
        for name in ("rounds", "finalists"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name}: got {getattr(self, name)}; must be 1 or more")


WORKLOAD, SEARCH = WorkloadOptions(), SearchOptions()


@command
def tune(
    model: str,
    /,
    *,
    prompts: Path,
    output: Path,
    dry_run: Flag = False,
    json_output: JsonFlag = False,
    workload: WorkloadOptions = WORKLOAD,
    search: SearchOptions = SEARCH,
    engine: EngineOptions = ENGINE,
) -> None:
    """Find the best speculative configuration for your prompts at your load.

    The model answers the prompts once; every configuration is simulated on its answers, and the best few are run for
    real, in turn. Writes a file for "forerun serve --config", a plan for "forerun emit", the reasons, and a picture. Whatever interrupts it, the
    same command goes on where it was.

    Args:
        model: A folder, a .gguf file, a known name (see "forerun models list") or a hub id org/name.
        prompts: A .txt file with one prompt per line, or .jsonl with "prompt", "question", "turns" or "messages".
        output: Folder for serve.yaml, plan.json, tuning.json and pareto.svg, and for what is needed to go on.
        dry_run: Say how long it would take, and do no more: nothing is written.
        json_output: Print one line of JSON for machines, and nothing else, on standard output.

    Examples:
        forerun tune smollm2-135m --prompts chat.jsonl --output tuned
        forerun tune smollm2-135m --prompts chat.jsonl --output tuned --load rate=2 --goodput ttft:500 tpot:50
        forerun serve --config tuned/serve.yaml
        forerun emit --plan tuned --to compose --output launch
    """
    # torch: only when it is needed
    from forerun.bench.tuning.folder import REPORT_FILE, SERVE_FILE, TuningFolder, write
    from forerun.bench.tuning.step_times import check_profile
    from forerun.bench.tuning.tuner import Tuner
    from forerun.plan.profile import Profile
    from forerun.plan.tuning.serve_config import serve_config, serve_options
    from forerun.plan.tuning.tuned_plan import tuned_plan

    _refuse_speculation(engine)
    targets: dict[str | None, LoadedTarget] = {}

    def load_target(quantization: str | None) -> LoadedTarget:
        if quantization not in targets:
            targets[quantization] = loading.load_target(replace(settings.engine, quantization=quantization))
        return targets[quantization]

    known = None if search.profile is None else Profile.load(search.profile)
    if known is not None:
        known.check_fits(model=model)  # the rest when it is loaded
    settings, target = _settings(model, prompts, workload, search, engine)
    targets[engine.quantization] = target
    if known is not None:
        check_profile(known, settings.engine, settings.space.quantizations, load_target)
    folder = TuningFolder(output, _identity(settings, target, search.profile), begins=not dry_run)
    console = plain_console(stderr=True)
    with nullcontext() if dry_run else folder.held(), resumable(lambda: not dry_run), status() as progress:
        tuner = Tuner(settings=settings, folder=folder, load_target=load_target, progress=progress, profile=known)
        if dry_run or not folder.seconds():
            estimate = tuner.estimate()
            _show_estimate(console, estimate)
        if dry_run:
            if json_output:
                print(json.dumps(asdict(estimate) | {"total": estimate.total}))
            return
        report = tuner.tune()
    document = report.to_json()
    write(folder.path / REPORT_FILE, document)
    options = serve_options(model, report.best, _changed(engine))
    (folder.path / SERVE_FILE).write_text(serve_config(options, report.reasons()), encoding="utf-8")
    tuned_plan(
        report,
        offered=settings.workload.load,
        prompt_lengths=[len(prompt) for prompt in settings.workload.prompts],
        engine=_planned_engine(report.best, settings.engine, load_target(report.best.quantization)),
    ).save(folder.path)
    picture = _draw(report, folder)
    if json_output:
        print(json.dumps(document))
    else:
        console = plain_console()
        _show(report, folder.path / SERVE_FILE, picture, console)


def _planned_engine(best: Candidate, engine: EngineSettings, target: LoadedTarget) -> PlannedEngine:
    """The settings of the engine that ran the best configuration."""
    from forerun.plan.deployment_plan import PlannedEngine

    longest = target.model.max_model_len
    return PlannedEngine(
        max_num_seqs=best.limits.max_num_seqs,
        max_num_batched_tokens=best.limits.max_num_batched_tokens,
        max_model_len=longest if engine.max_model_len is None else min(longest, engine.max_model_len),
        block_size=engine.block_size,
        dtype=str(target.model.dtype).removeprefix("torch."),
        quantization=best.quantization,
        tensor_parallel_size=engine.tensor_parallel_size,
        device=target.model.device.type,
        kernel_settings=engine.kernel_settings,
    )


def _settings(
    model: str, prompts: Path, workload: WorkloadOptions, search: SearchOptions, engine: EngineOptions
) -> tuple[TuningSettings, LoadedTarget]:
    """Check all options, then load the model, whose tokenizer reads the prompts."""
    from forerun.bench.prompts import encode_prompt  # torch: only when it is needed
    from forerun.bench.tuning.requests import TuningWorkload
    from forerun.bench.tuning.tuner import TuningSettings
    from forerun.config.settings import EngineSettings
    from forerun.plan.tuning.choice import Objective
    from forerun.plan.tuning.goodput import parse_goodput
    from forerun.plan.tuning.offered_load import parse_offered_load

    load = parse_offered_load(workload.load)
    sla = None if workload.goodput is None else parse_goodput(workload.goodput)
    usual = "goodput" if sla is not None else "throughput" if load.rate is None else "latency"
    given = read_prompts(prompts)[: workload.num_prompts]
    space = _space(load, search, engine, temperature=workload.temperature)
    engine_settings = EngineSettings.from_keywords(model, engine.without_pools().plain_settings())
    for quantization in space.quantizations:  # checked by the settings, before anything is loaded
        replace(engine_settings, quantization=quantization)
    target = loading.load_target(engine_settings)
    if target.tokenizer is None:
        raise ConfigError(f"--prompts: {model} has no tokenizer to read them with; give a folder that holds one")
    settings = TuningSettings(
        engine=engine_settings,
        workload=TuningWorkload(
            prompts=[encode_prompt(target.tokenizer, prompt) for prompt in given],
            load=load,
            max_tokens=workload.max_tokens,
            temperature=workload.temperature,
            sla=sla,
            seed=engine.seed,
        ),
        space=space,
        objective=Objective(workload.objective or usual),
        rounds=search.rounds,
        num_finalists=search.finalists,
    )
    return settings, target


def _space(load: OfferedLoad, search: SearchOptions, engine: EngineOptions, *, temperature: float) -> SearchSpace:
    from forerun.core.sampling_params import GREEDY_BELOW
    from forerun.plan.tuning.candidates import LOSSLESS_VERIFIERS, SPECULATION, SearchSpace

    speculation: Mapping[str, Mapping[str, Any]] = (
        SPECULATION if search.configs is None else read_configs(search.configs)
    )
    quantizations = dict.fromkeys([engine.quantization, *(search.try_quantization or ())])
    return SearchSpace(
        speculation=speculation,
        limits=_limits(load, search, engine),
        quantizations=tuple(quantizations),
        verifiers=() if temperature < GREEDY_BELOW else LOSSLESS_VERIFIERS,
    )


def _limits(load: OfferedLoad, search: SearchOptions, engine: EngineOptions) -> list[BatchLimits]:
    """The limits that the engine options give, and those that are to be tried too.

    Raises:
        ConfigError: a value is below 1, or leaves no row for each sequence.
    """
    from forerun.plan.tuning.candidates import BatchLimits

    usual = BatchLimits(max_num_seqs=engine.max_num_seqs, max_num_batched_tokens=engine.max_num_batched_tokens)
    may_fill = load.concurrency is None or load.concurrency > usual.max_num_seqs
    found = [usual]
    for (max_num_seqs, is_asked), (max_num_batched_tokens, are_asked) in product(
        _values(usual.max_num_seqs, search.try_max_num_seqs, may_fill=may_fill),
        _values(usual.max_num_batched_tokens, search.try_max_num_batched_tokens, may_fill=may_fill),
    ):
        limits = BatchLimits(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        if limits in found:
            continue
        if 1 <= max_num_seqs <= max_num_batched_tokens:
            found.append(limits)
        elif is_asked and are_asked:
            raise ConfigError(
                f"--try-max-num-seqs, --try-max-num-batched-tokens: got {max_num_seqs} sequences with "
                f"{max_num_batched_tokens} tokens; each sequence needs a token, and there must be one or more"
            )
    return found


def _values(usual: int, tried: Sequence[int] | None, *, may_fill: bool) -> list[tuple[int, bool]]:
    """The usual value of a limit and others to be tried, and of each whether the user gave it.

    Where the user names none to try, that is a quarter of it, if the load may reach the limit.
    """
    if tried is not None:
        return [(value, True) for value in (usual, *tried)]
    return [(usual, True), (usual // 4, False)] if may_fill and usual >= 4 else [(usual, True)]


def _identity(settings: TuningSettings, target: LoadedTarget, profile: Path | None) -> dict[str, Any]:
    """What a tuning is of: a folder goes on only with the same."""
    from forerun.bench.drafter_files import drafter_fingerprints
    from forerun.bench.machine import kernel_table, machine_name  # torch: only when it is needed

    workload, engine, kernels = settings.workload, settings.engine, target.kernels
    prompts = hashlib.sha256(json.dumps([*workload.prompts]).encode()).hexdigest()[:16]
    return {
        "forerun": forerun.__version__,
        "model": engine.model,
        "fingerprint": target.fingerprint()[:16],
        "machine": machine_name(target.model.device),
        "kernels": None if kernels is None else f"{kernels.level}, {kernels.num_threads} threads",
        "kernel_table": kernel_table(target.model.device, engine.kernel_table),
        "engine": {one.name: str(getattr(engine, one.name)) for one in fields(engine) if one.name not in OF_THE_SPACE},
        "profile": None if profile is None else hashlib.sha256((profile / PROFILE_FILE).read_bytes()).hexdigest()[:16],
        "prompts": f"{len(workload.prompts)} prompts, {prompts}",
        "load": workload.load.to_json(),
        "max_tokens": workload.max_tokens,
        "temperature": workload.temperature,
        "sla": None if workload.sla is None else workload.sla.to_json(),
        "objective": str(settings.objective),
        "space": settings.space.to_json(),
        "drafters": drafter_fingerprints(settings.space.speculation) or None,
        "num_finalists": settings.num_finalists,
    }


def _refuse_speculation(engine: EngineOptions) -> None:
    if engine.no_speculation:
        raise ConfigError("--no-speculation: tune tries plain decoding anyway; leave it out")
    if engine.names_drafter:
        raise ConfigError(
            "--speculative-config: tune finds it; leave it out, or list what may be chosen with --configs"
        )
    if engine.kv_transfer_config is not None:
        raise ConfigError("--kv-transfer-config: tune saves no hidden states; leave it out")


def _changed(engine: EngineOptions) -> dict[str, Any]:
    """The engine options that are not as they are by default, as `forerun serve` takes them."""
    chosen = ("max_num_seqs", "max_num_batched_tokens", "quantization")
    changed = {
        field.name: getattr(engine, field.name)
        for field in fields(engine)
        if field.name not in chosen and getattr(engine, field.name) != getattr(ENGINE, field.name)
    }
    return {name: str(value) if isinstance(value, Path) else value for name, value in changed.items()}


def _show_estimate(console: Console, found: Estimate) -> None:
    console.print(
        f"at most about {_minutes(found.total)}: answers {_minutes(found.record)}, step times {_minutes(found.measure_steps)}, "
        f"simulation {_minutes(found.simulate)}, real runs {_minutes(found.run)}",
        soft_wrap=True,
    )


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _draw(report: TuningReport, folder: TuningFolder) -> Path | None:
    """Draw the picture; None where matplotlib is missing."""
    if find_spec("matplotlib") is None:
        return None
    from forerun.bench.tuning.folder import PICTURE_FILE
    from forerun.bench.tuning.picture import draw_tuning

    draw_tuning(report, folder.path / PICTURE_FILE)
    return folder.path / PICTURE_FILE


def _show(report: TuningReport, config: Path, picture: Path | None, console: Console) -> None:
    """Print the runs, the reasons, and where the files are."""
    runs, front = report.medians, report.front()
    has_energy = any(run.joules_per_token is not None for run in runs.values())
    columns = ["runs", "tokens/s", "ms/request", "TTFT ms", "TPOT ms", "p95 TPOT"]
    columns += ["goals kept"] if any(run.attainment is not None for run in runs.values()) else []
    columns += ["J/token"] if has_energy else []
    table = Table(title=f"{report.model} at {report.load}")
    table.add_column("", no_wrap=True)
    for name in (*columns, "Pareto front"):
        table.add_column(name, justify="right")
    for name, run in sorted(runs.items(), key=lambda item: -item[1].tokens_per_second):
        cells = [
            str(len(report.rounds[name])),
            f"{run.tokens_per_second:.1f}",
            f"{1e3 * run.e2el.mean:.0f}",
            f"{1e3 * run.ttft.mean:.0f}",
            f"{1e3 * run.tpot.mean:.2f}",
            f"{1e3 * run.tpot.p95:.2f}",
        ]
        cells += [report.shown_attainment(run)] if run.attainment is not None else []
        cells += ["-" if run.joules_per_token is None else f"{run.joules_per_token:.2f}"] if has_energy else []
        style = "bold" if name == report.choice.name else ""
        table.add_row(Text(name, style=style), *cells, "yes" if name in front else "")
    console.print(table)
    for line in report.reasons():
        console.print(line)
    drawn = (
        "no picture: matplotlib is not installed (pip install 'forerun[bench]')" if picture is None else str(picture)
    )
    console.print(f"forerun serve --config {config}\n{drawn}", soft_wrap=True)  # a path is not broken in two
