"""Serves loads and simulates the same, from a profile made before of other prompts: how far is the simulator off?

python -m benchmarks.simulation_accuracy run FOLDER [--quick] [--minutes M]
python -m benchmarks.simulation_accuracy report FOLDER [--json FILE]

FOLDER keeps the profile and each run as soon as it is measured; called again, the command goes on where it was.
Every run has a server of its own. The first one, of plain decoding with the profile's own prompts, is no test:
what the server takes of the engine's time, for each request and each chunk, is fitted to it. Rates are shares of what the simulator says that the configuration can
serve; one load comes in clumps. The report simulates all runs and shows the errors.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.command_line import STILL_TO_DO, run_command
from benchmarks.simulation_accuracy.comparison import GOALS, Compared, compare, fit_serving, summary
from benchmarks.simulation_accuracy.prompts import mixed_prompts, prompts_by_kind
from benchmarks.simulation_accuracy.runs import NUM_WARMUPS, RealRun, Serving, measure
from forerun.bench.instruments import BandwidthProbe, Stopwatch, read_by_torch
from forerun.bench.machine import describe_machine
from forerun.bench.profiling.grid import GRIDS
from forerun.bench.profiling.profiler import Profiler, ProfileTask
from forerun.bench.prompts import encode_prompt
from forerun.build import load_target
from forerun.config.settings import EngineSettings
from forerun.errors import ConfigError
from forerun.models.store import resolve_model
from forerun.models.tokenizer import load_tokenizer
from forerun.ops.native.library import load_kernels
from forerun.plan.profile import Profile
from forerun.plan.simulation.profiled import PLAIN, profiled_engine
from forerun.plan.simulation.requests import SimulatedRequest

SUFFIX = {"method": "suffix", "suffix_decoding_max_cached_requests": 0}
"""Without a pool of past answers: what it brings depends on the order in which requests come."""

CONFIGS: dict[str, dict[str, Any] | None] = {PLAIN: None, "suffix": SUFFIX, "auto": {"method": "auto"}}

LOADS = {"idle": 0.1, "light": 0.4, "busy": 0.7, "full": 0.9, "overload": 1.2, "bursts": 0.6}
"""Rate of each load, over what the configuration can serve."""

BURSTINESS = {"bursts": 0.2}  # of the gaps' gamma distribution; 1 is a Poisson process
QUICK_LOADS = ("light", "overload")
FEWEST, MOST = 30, 300  # requests of a run
CALIBRATION = "calibration"  # plain decoding at a middling load, with the profile's prompts
CALIBRATION_SHARE = 0.6

LIMITS: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": 32, "max_num_batched_tokens": 1024}


def main() -> None:
    """Parse the arguments and run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation_accuracy", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="profile, serve and measure what is still missing")
    running.add_argument("--model", default="smollm2-135m")
    running.add_argument("--seconds", type=float, default=60, help="about how long requests arrive in a run")
    running.add_argument("--max-tokens", type=int, default=128, help="of each answer")
    running.add_argument("--configs", nargs="+", choices=CONFIGS, default=[*CONFIGS])
    running.add_argument("--loads", nargs="+", choices=LOADS, default=[*LOADS])
    running.add_argument("--quick", action="store_true", help="a small profile, two loads, short runs")
    running.add_argument("--minutes", type=float, default=float("inf"), help="no run begins after so many")
    reporting = commands.add_parser("report", help="simulate what was measured, and print the errors")
    reporting.add_argument("--json", type=Path)
    reporting.add_argument("--seed", type=int, default=0, help="of the simulated drafts")
    for command in (running, reporting):
        command.add_argument("folder", type=Path)
    run_command(parser, {"run": _run, "report": _report})


def _run(arguments: argparse.Namespace) -> int:
    """Profile and measure what is missing."""
    started, folder = time.monotonic(), arguments.folder
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    settings = EngineSettings(model=arguments.model, **LIMITS)
    device = settings.torch_device
    profile = _profile(settings, folder / "profile", quick=arguments.quick)
    kernels = load_kernels() if device.type == "cpu" else None
    probe = BandwidthProbe(Stopwatch(device), read=kernels.read if kernels else read_by_torch)
    serving = Serving(model=arguments.model, configs=CONFIGS, **LIMITS)
    seconds = arguments.seconds / 4 if arguments.quick else arguments.seconds
    wanted = _runs(profile, arguments, seconds)
    num_left = 0
    for run in wanted:
        file = folder / "runs" / f"{run.name}.json"
        if file.exists():
            continue
        if time.monotonic() - started >= 60 * arguments.minutes:
            num_left += 1
            continue
        print(f"{run.name}: {run.num_requests} requests at {run.rate:.2f} per second", file=sys.stderr)
        prompts = mixed_prompts(MOST + NUM_WARMUPS, is_test=run.load != CALIBRATION)
        measure(run, serving, prompts, max_tokens=arguments.max_tokens, probe=probe, file=file)
    if num_left:
        print(f"{num_left} run(s) are still to be measured: give the same command again", file=sys.stderr)
    return STILL_TO_DO if num_left else 0


def _profile(settings: EngineSettings, folder: Path, *, quick: bool) -> Profile:
    """The profile of the folder, or what is missing of it measured now, with prompts that no run sends."""
    if (folder / "profile.json").is_file():
        return Profile.load(folder)
    target = load_target(resolve_model(settings.model), settings, settings.torch_device)
    tokenizer = target.tokenizer
    assert tokenizer is not None, "the model has one"
    grid = GRIDS["quick" if quick else "usual"]
    texts = prompts_by_kind(4 if quick else 16, is_test=False)
    task = ProfileTask(
        settings=settings,
        configs={name: config for name, config in CONFIGS.items() if config is not None},
        prompts={kind: [encode_prompt(tokenizer, text) for text in some] for kind, some in texts.items()},
        grid=grid,
    )
    say = lambda line: print(line, file=sys.stderr)  # noqa: E731 - it is given twice
    return Profiler(target=target, task=task, folder=folder, progress=say, announce=say).run()


def _runs(profile: Profile, arguments: argparse.Namespace, seconds: float) -> list[RealRun]:
    """The runs that are asked for, configurations in turn."""
    loads = [one for one in arguments.loads if not arguments.quick or one in QUICK_LOADS]
    rates = {name: capacity(profile, name, arguments.max_tokens) for name in {PLAIN, *arguments.configs}}

    def run(config: str, load: str, share: float) -> RealRun:
        rate = share * rates[config]
        return RealRun(
            config=config,
            load=load,
            share=share,
            rate=round(rate, 3),
            burstiness=BURSTINESS.get(load, 1.0),
            num_requests=min(max(round(rate * seconds), FEWEST), MOST),
        )

    tests = [run(config, load, LOADS[load]) for load in loads for config in arguments.configs]
    return [run(PLAIN, CALIBRATION, CALIBRATION_SHARE), *tests]


def capacity(profile: Profile, config: str, max_tokens: int) -> float:
    """Requests per second of an engine that always has some waiting, by the simulator: prompts of about 250 tokens."""
    requests = [SimulatedRequest(arrival=0.0, num_prompt_tokens=250, num_output_tokens=max_tokens) for _ in range(200)]
    return profiled_engine(profile, config).simulate(requests).request_throughput


def _report(arguments: argparse.Namespace) -> int:
    """Simulate all runs, and print and write the errors."""
    folder = arguments.folder
    profile = Profile.load(folder / "profile")
    runs = [json.loads(file.read_text()) for file in sorted((folder / "runs").glob("*.json"))]
    tests = [run for run in runs if run["load"] != CALIBRATION]
    if not tests or len(tests) == len(runs):
        raise ConfigError(f"{folder}: has {len(runs)} run(s); measure a calibration and a test with the command run")
    tokenizer = load_tokenizer(resolve_model(profile.model))

    def ids_of(run: dict[str, Any]) -> list[list[int]]:
        prompts = mixed_prompts(MOST + NUM_WARMUPS, is_test=run["load"] != CALIBRATION)
        return [encode_prompt(tokenizer, prompt) for prompt in prompts[: len(run["ttfts"])]]

    calibration = next(run for run in runs if run["load"] == CALIBRATION)
    serving = fit_serving(calibration, profile, ids_of(calibration))
    compared = [compare(run, profile, serving, ids_of(run), seed=arguments.seed) for run in tests]
    compared.sort(key=lambda one: ([*CONFIGS].index(one.config), [*LOADS].index(one.load)))
    print(
        f"a server takes {1e6 * serving.seconds_per_chunk:.0f} µs per chunk, {1e3 * serving.seconds_per_request:.1f} ms per request"
    )
    _show(compared, Console(highlight=False))
    if arguments.json:
        document = {
            "model": profile.model,
            "machine": describe_machine(EngineSettings(model=profile.model).torch_device),
            "goals": GOALS,
            "serving": asdict(serving),
            "step_times": profile.step_times.to_json(),
            "profile_gigabytes_per_second": profile.gigabytes_per_second,
            "summary": summary(compared),
            "runs": [one.to_json() for one in compared],
        }
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def _show(compared: list[Compared], console: Console) -> None:
    """Print the errors of each run, and over all."""
    names = [*compared[0].errors]
    table = Table(title="simulated / real - 1")
    for name in ("", "load", "requests", "GB/s", *names):
        table.add_column(name.replace("_", " "), justify="left" if name in ("", "load") else "right")
    for before, one in zip([None, *compared], compared, strict=False):
        if before is None or before.config != one.config:
            table.add_section()
        errors = [f"{one.errors[name]:+.1%}" for name in names]
        table.add_row(one.config, one.load, str(one.num_requests), f"{one.gigabytes_per_second:.0f}", *errors)
    table.add_section()
    found = summary(compared)
    for title in ("mean", "largest", "within_goal", "within_limit"):
        table.add_row(title.replace("_", " "), "", "", "", *(f"{found[name][title]:.1%}" for name in names))
    console.print(table)


if __name__ == "__main__":
    main()
