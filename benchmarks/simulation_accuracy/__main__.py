"""Serves loads and simulates the same, from a profile made before of other prompts: how far is the simulator off?

python -m benchmarks.simulation_accuracy run FOLDER [--rounds N] [--minutes M] [--quick]
python -m benchmarks.simulation_accuracy report FOLDER [--json FILE]

FOLDER keeps the profile and each run as soon as it is measured; called again, the command goes on where it was, and
measures runs again that other programs disturbed. The profile takes about four minutes, a round as long. Runs are
short and come in rounds, each with a new server for each configuration, one after the other, as the machine's speed drifts. Three of each configuration with the
profile's own prompts are no test: what its server takes of the engine's time, for each request, step and chunk, is
fitted to them. Rates are shares of what the simulator says that the configuration can serve; one load comes in clumps.
Between runs the machine's speed is probed, by prompts and steps of plain decoding in a process of their own, and the
memory and arithmetic of simulated steps are scaled by it. The report simulates all runs and shows the errors, those of all rounds together.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.command_line import STILL_TO_DO, run_command
from benchmarks.simulation_accuracy.comparison import GOALS, Compared, ServedRun, compare, fit_serving, summary
from benchmarks.simulation_accuracy.prompts import KINDS, mixed_prompts, prompts_by_kind
from benchmarks.simulation_accuracy.runs import (
    NUM_WARMUPS,
    LoadedServer,
    MachineProbe,
    MachineSpeed,
    RealRun,
    Serving,
    is_disturbed,
)
from benchmarks.simulation_accuracy.speed import AS_PROFILED, Slowness, SpeedProbe
from forerun.bench.instruments import BandwidthProbe, Stopwatch, read_by_torch
from forerun.bench.machine import describe_machine, machine_name
from forerun.bench.profiling.grid import GRIDS
from forerun.bench.profiling.profiler import Profiler, ProfileTask
from forerun.bench.prompts import encode_prompt
from forerun.build import load_target
from forerun.config.settings import EngineSettings
from forerun.errors import ConfigError
from forerun.models.base import LoadedTarget
from forerun.models.store import resolve_model
from forerun.models.tokenizer import Tokenizer, load_tokenizer
from forerun.ops.native.library import load_kernels
from forerun.ops.native.threads import release_cores
from forerun.plan.profile import PLAIN, Profile, write_json
from forerun.plan.simulation.profiled import profiled_engine
from forerun.plan.simulation.requests import SimulatedRequest

SUFFIX = {"method": "suffix", "suffix_decoding_max_cached_requests": 0}
"""Without a pool of past answers: what it brings depends on the order in which requests come."""

CONFIGS: dict[str, dict[str, Any] | None] = {PLAIN: None, "suffix": SUFFIX, "auto": {"method": "auto"}}

LOADS = {"idle": 0.1, "light": 0.4, "busy": 0.7, "full": 0.9, "overload": 1.5, "bursts": 0.6}
"""Rate of each load, over what the configuration can serve."""

BURSTINESS = {"bursts": 0.2}  # of the gaps' gamma distribution; 1 is a Poisson process
QUICK_LOADS = ("light", "overload")
FEWEST, MOST = 5, 36  # requests of a run
NUM_PROMPT_SETS = 3  # there are no more prompts; rounds after that many begin anew
CALIBRATIONS = {"calibration-idle": 0.1, "calibration-busy": 0.6, "calibration-overload": 1.5}
"""Loads of the profile's prompts."""

NUM_TEXTS = 40  # of each kind in the profile
PROFILE_ROUNDS = 4

MOST_OTHERS = 0.1  # cores

LIMITS: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": 32, "max_num_batched_tokens": 1024}


def main() -> None:
    """Parse the arguments and run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation_accuracy", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="profile, serve and measure what is still missing")
    running.add_argument("--model", default="smollm2-135m")
    running.add_argument("--rounds", type=int, default=3)
    running.add_argument("--seconds", type=float, default=6, help="about how long requests arrive in a run")
    running.add_argument("--max-tokens", type=int, default=128, help="of each answer")
    running.add_argument("--configs", nargs="+", choices=CONFIGS, default=[*CONFIGS])
    running.add_argument("--loads", nargs="+", choices=LOADS, default=[*LOADS])
    running.add_argument("--quick", action="store_true", help="a small profile, two loads, short runs")
    running.add_argument("--minutes", type=float, default=float("inf"), help="no run begins after so many")
    reporting = commands.add_parser("report", help="simulate what was measured, and print the errors")
    reporting.add_argument("--json", type=Path)
    reporting.add_argument("--seeds", type=int, default=4, help="so many simulations, of other drafts, of each run")
    reporting.add_argument(
        "--speed",
        choices=("steps", "memory", "profile"),
        default="steps",
        help="by what steps are scaled from the profile to a run: probed steps or the memory's bandwidth around it, or nothing",
    )
    for command in (running, reporting):
        command.add_argument("folder", type=Path)
        command.add_argument(
            "--most-others",
            type=float,
            default=MOST_OTHERS,
            help="cores that other programs may keep busy during a run, on average; one with more is measured again, and left out",
        )
    run_command(parser, {"run": _run, "report": _report})


def _run(arguments: argparse.Namespace) -> int:
    """Profile and measure what is missing, or was disturbed."""
    started, folder = time.monotonic(), arguments.folder
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    settings = EngineSettings(model=arguments.model, **LIMITS)
    device = settings.torch_device
    target = load_target(resolve_model(settings.model), settings, device)
    profile = _profile(target, settings, folder / "profile", quick=arguments.quick)
    kernels = load_kernels() if device.type == "cpu" else None
    memory = BandwidthProbe(Stopwatch(device), read=kernels.read if kernels else read_by_torch)
    probe = MachineProbe(SpeedProbe(target, settings, profile), memory)
    release_cores()  # those that the probe's threads are bound to: it computes nothing while a server does
    rates = _rates(profile, folder / "rates.json", probe, arguments.max_tokens)
    print(", ".join(f"{name}: {rate:.2f} requests per second" for name, rate in rates.items()), file=sys.stderr)
    options = Serving(model=arguments.model, configs=CONFIGS, **LIMITS)
    num_left = 0
    for number in range(1 if arguments.quick else arguments.rounds):
        runs = [run for run in _runs_of_round(number, rates, arguments) if not _is_measured(run, arguments)]
        end = started + 60 * arguments.minutes
        if not runs or time.monotonic() >= end:
            num_left += len(runs)
            continue
        for config in dict.fromkeys(run.config for run in runs):
            of_config = [run for run in runs if run.config == config]
            if time.monotonic() >= end:
                num_left += len(of_config)
                continue
            with LoadedServer.of(options, config) as server:
                speed = probe.settled()
                for run in of_config:
                    if time.monotonic() >= end:
                        num_left += 1
                        continue
                    speed, is_good = _measure(run, server, speed, probe, arguments)
                    num_left += not is_good
    if num_left:
        print(f"{num_left} run(s) are still to be measured: give the same command again", file=sys.stderr)
    return STILL_TO_DO if num_left else 0


def _measure(
    run: RealRun, server: LoadedServer, before: MachineSpeed, probe: MachineProbe, arguments: argparse.Namespace
) -> tuple[MachineSpeed, bool]:
    """Measure and keep a run; the machine's speed after it, and whether other programs left it alone."""
    print(f"{run.name}: {run.num_requests} requests at {run.rate:.2f} per second", file=sys.stderr)
    prompts = prompts_of(run.load, run.round, run.num_requests + NUM_WARMUPS)
    record, after = server.measure(run, prompts, max_tokens=arguments.max_tokens, before=before, probe=probe)
    write_json(_file(run, arguments.folder), record)
    disturbed = is_disturbed(record, arguments.most_others)
    if disturbed:
        print(f"{run.name}: other programs kept {record['others_cores']:.2f} cores busy", file=sys.stderr)
    return after, not disturbed


def _file(run: RealRun, folder: Path) -> Path:
    return folder / "runs" / f"{run.name}.json"


def _is_measured(run: RealRun, arguments: argparse.Namespace) -> bool:
    file = _file(run, arguments.folder)
    return file.exists() and not is_disturbed(json.loads(file.read_text()), arguments.most_others)


def _rates(profile: Profile, file: Path, probe: MachineProbe, max_tokens: int) -> dict[str, float]:
    """Requests per second that each configuration can serve, as fast as the machine was when the first run began."""
    if not file.exists():
        now = replace(profile, step_times=probe.measure().slowness.of(profile.step_times))
        write_json(file, {name: capacity(now, name, max_tokens) for name in CONFIGS})
    found: dict[str, float] = json.loads(file.read_text())
    return found


def _profile(target: LoadedTarget, settings: EngineSettings, folder: Path, *, quick: bool) -> Profile:
    """The profile of the folder, or what is missing of it measured now, with prompts that no run sends.

    Raises:
        ConfigError: it was made of another model or on another machine, whose runs would be mixed with those to come.
    """
    if (folder / "profile.json").is_file():
        found = Profile.load(folder)
        found.check_fits(model=settings.model, machine=machine_name(settings.torch_device))
        return found
    tokenizer = target.tokenizer
    assert tokenizer is not None, "the model has one"
    grid = GRIDS["quick"] if quick else replace(GRIDS["usual"], num_texts=NUM_TEXTS, rounds=PROFILE_ROUNDS)
    texts = prompts_by_kind(4 if quick else NUM_TEXTS, is_test=False)
    task = ProfileTask(
        settings=settings,
        configs={name: config for name, config in CONFIGS.items() if config is not None},
        prompts={kind: [encode_prompt(tokenizer, text) for text in some] for kind, some in texts.items()},
        grid=grid,
    )
    say = lambda line: print(line, file=sys.stderr)  # noqa: E731 - it is given twice
    return Profiler(target=target, task=task, folder=folder, progress=say, announce=say).run()


def _runs_of_round(number: int, rates: Mapping[str, float], arguments: argparse.Namespace) -> list[RealRun]:
    """The runs of a round, those of one configuration after those of another, which begins in turn."""
    seconds = arguments.seconds / 2 if arguments.quick else arguments.seconds
    loads = [one for one in arguments.loads if not arguments.quick or one in QUICK_LOADS]

    def run(config: str, load: str, share: float) -> RealRun:
        rate = share * rates[config]
        return RealRun(
            config=config,
            load=load,
            round=number,
            share=share,
            rate=round(rate, 3),
            burstiness=BURSTINESS.get(load, 1.0),
            num_requests=min(max(round(rate * seconds), FEWEST), MOST),
        )

    first = number % len(arguments.configs)
    shares = CALIBRATIONS | {load: LOADS[load] for load in loads}
    configs = [*arguments.configs[first:], *arguments.configs[:first]]
    return [run(config, load, share) for config in configs for load, share in shares.items()]


def prompts_of(load: str, round_number: int, count: int) -> list[str]:
    """The prompts of a run; those of no other run that the same server has; the kinds of `KINDS` in turn."""
    is_test = load not in CALIBRATIONS
    loads = [*LOADS] if is_test else [*CALIBRATIONS]
    place = loads.index(load) + len(loads) * (round_number % NUM_PROMPT_SETS)
    first = place * (MOST + NUM_WARMUPS)
    return mixed_prompts(first + count, is_test=is_test)[first:]


def capacity(profile: Profile, config: str, max_tokens: int) -> float:
    """Requests per second of an engine that always has some waiting, by the simulator: prompts of about 250 tokens."""
    requests = [SimulatedRequest(arrival=0.0, num_prompt_tokens=250, num_output_tokens=max_tokens) for _ in range(200)]
    return profiled_engine(profile, config).simulate(requests).request_throughput


def _report(arguments: argparse.Namespace) -> int:
    """Simulate all runs, and print and write the errors."""
    folder = arguments.folder
    profile = Profile.load(folder / "profile")
    tokenizer = load_tokenizer(resolve_model(profile.model))
    records = [json.loads(file.read_text()) for file in sorted((folder / "runs").glob("*.json"))]
    good = [one for one in records if not is_disturbed(one, arguments.most_others)]
    if len(good) < len(records):
        print(
            f"left out: {len(records) - len(good)} run(s) that other programs disturbed; the command run repeats them"
        )
    served = [_served(one, tokenizer, profile, arguments.speed) for one in good]
    tests = [run for run in served if run.load not in CALIBRATIONS]
    calibrations = [run for run in served if run.load in CALIBRATIONS]
    configs = {run.config for run in tests}
    if not tests or not {(run.config, run.load) for run in calibrations} >= {*product(configs, CALIBRATIONS)}:
        raise ConfigError(f"{folder}: has {len(served)} run(s); measure calibrations and tests with the command run")
    # What a server takes to read requests and to write chunks does not depend on what it drafts: one cost for all.
    serving = fit_serving(
        [
            [run for run in calibrations if (run.config, run.load) == one]
            for one in product(sorted(configs), CALIBRATIONS)
        ],
        profile,
    )
    groups: dict[tuple[str, str], list[ServedRun]] = {}
    for run in tests:
        groups.setdefault((run.config, run.load), []).append(run)
    compared = [compare(some, profile, serving, seeds=range(arguments.seeds)) for some in groups.values()]
    compared.sort(key=lambda one: ([*CONFIGS].index(one.config), [*LOADS].index(one.load)))
    print(
        f"the server takes {1e3 * serving.seconds_per_request:.1f} ms per request "
        f"({1e3 * (serving.seconds_per_idle_request or 0):.1f} while nothing is computed), "
        f"{1e6 * serving.seconds_per_step:.0f} µs per step and {1e6 * serving.seconds_per_chunk:.0f} µs per chunk"
    )
    drift = _drift(good)
    print(f"from one probe to the next, steps changed by {drift:.1%} on average")
    _show(compared, Console(highlight=False))
    if arguments.json:
        document = {
            "model": profile.model,
            "machine": describe_machine(EngineSettings(model=profile.model).torch_device),
            "goals": GOALS,
            "serving": asdict(serving),
            "speed": arguments.speed,
            "step_times": profile.step_times.to_json(),
            "drafting": {name: cost.to_json() for name, cost in profile.drafting.items()},
            "profile_gigabytes_per_second": profile.gigabytes_per_second,
            "num_rounds": max(len(one.errors_by_round) for one in compared),
            "drift": drift,
            "summary": summary(compared),
            "runs": [one.to_json() for one in compared],
        }
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def _served(run: dict[str, Any], tokenizer: Tokenizer, profile: Profile, speed: str) -> ServedRun:
    """A kept run with its prompts' token ids and kinds."""
    memory = (profile.gigabytes_per_second or math.nan) / run["gigabytes_per_second"]
    slowness = {
        "steps": Slowness.mean([Slowness(**one) for one in run["slowness"]]),
        "memory": Slowness(memory=memory, arithmetic=1.0),
        "profile": AS_PROFILED,
    }
    prompts = prompts_of(run["load"], run["round"], len(run["ttfts"]))
    return ServedRun(
        config=run["config"],
        load=run["load"],
        round=run["round"],
        share=run["share"],
        gigabytes_per_second=run["gigabytes_per_second"],
        slowness=slowness[speed],
        prompts=[encode_prompt(tokenizer, prompt) for prompt in prompts],
        kinds=[KINDS[number % len(KINDS)] for number in range(len(prompts))],
        input_lens=run["input_lens"],
        output_lens=run["output_lens"],
        start_times=run["start_times"],
        ttfts=run["ttfts"],
        latencies=run["latencies"],
    )


def _drift(records: Sequence[Mapping[str, Any]]) -> float:
    """By how much the probed slowness changed from before a run to after it, on average over both parts and all runs."""
    return fmean(
        Slowness(**after).change_since(Slowness(**before)) for before, after in (one["slowness"] for one in records)
    )


def _show(compared: list[Compared], console: Console) -> None:
    """Print the errors of each run, and over all."""
    names = [*compared[0].errors]
    table = Table(title="simulated / real - 1")
    for name in ("", "load", "requests", "slowness", *names):
        table.add_column(name.replace("_", " "), justify="left" if name in ("", "load") else "right")
    for before, one in zip([None, *compared], compared, strict=False):
        if before is None or before.config != one.config:
            table.add_section()
        errors = [f"{one.errors[name]:+.1%}" for name in names]
        table.add_row(
            one.config,
            one.load,
            str(one.num_requests),
            " ".join(f"{found.memory:.2f}/{found.arithmetic:.2f}" for found in one.slowness),
            *errors,
        )
    table.add_section()
    found = summary(compared)
    for title in ("bias", "mean", "largest", "between_rounds", "within_goal", "within_limit"):
        table.add_row(title.replace("_", " "), "", "", "", *(f"{found[name][title]:.1%}" for name in names))
    console.print(table)


if __name__ == "__main__":
    main()
