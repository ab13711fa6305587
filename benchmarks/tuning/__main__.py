"""Measures whether `forerun tune` finds the best configuration, and how quickly, against an exhaustive sweep.

python -m benchmarks.tuning run --prompts FILE --output FOLDER [--quick]
python -m benchmarks.tuning report FOLDER

For each load `run` tunes, then runs every configuration for real in interleaved rounds. Everything is kept in FOLDER as
soon as it is measured; called again, it goes on where it was. The chosen configuration is judged by the sweep's runs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.command_line import STILL_TO_DO, run_command
from benchmarks.tuning.comparison import TuningComparison, compare
from benchmarks.tuning.sweep import SweepFile, rounds_of, seconds_of, sweep
from forerun.bench.energy import EnergyMeter
from forerun.bench.machine import describe_machine
from forerun.bench.profiling.stages import digest
from forerun.bench.prompts import encode_prompt
from forerun.bench.recording import read_recording
from forerun.bench.tuning.folder import REPORT_FILE, TuningFolder, write
from forerun.bench.tuning.real_runs import RealRuns
from forerun.bench.tuning.requests import TuningWorkload
from forerun.bench.tuning.tuner import Tuner, TuningSettings
from forerun.build import load_target
from forerun.cli.input_files import read_prompts
from forerun.config.settings import EngineSettings
from forerun.errors import ConfigError
from forerun.models.base import LoadedTarget
from forerun.models.store import resolve_model
from forerun.plan.tuning.candidates import SPECULATION, BatchLimits, Candidate, SearchSpace
from forerun.plan.tuning.choice import Objective
from forerun.plan.tuning.offered_load import OfferedLoad, parse_offered_load
from forerun.plan.tuning.run_figures import RunFigures

LOADS = ("concurrency=1", "concurrency=8")
QUICK = {"num_prompts": 6, "max_tokens": 32, "rounds": 1}
QUICK_SPECULATION = ("auto", "ngram-3", "suffix-8", "recycle-chain-2", "suffix-recycle-7")


def main() -> None:
    """Parse the arguments and run the command."""
    run_command(_parser(), {"run": _run, "report": _report})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tuning", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="tune and sweep, and keep all figures")
    running.add_argument("--model", default="smollm2-135m", help="a folder or known name")
    running.add_argument("--prompts", type=Path, required=True, help="as for forerun tune")
    running.add_argument("--loads", nargs="+", default=[*LOADS], help="as forerun tune --load takes them")
    running.add_argument("--num-prompts", type=int, default=32, help="the first ones")
    running.add_argument("--max-tokens", type=int, default=128)
    running.add_argument("--rounds", type=int, default=3, help="of the sweep, and of the tuning")
    running.add_argument("--quick", action="store_true", help="a few configurations and tokens, to see that it works")
    running.add_argument("--minutes", type=float, default=float("inf"), help="no run begins after so many")
    running.add_argument("--output", type=Path, required=True, help="folder")
    reporting = commands.add_parser("report", help="print what a folder holds")
    reporting.add_argument("output", type=Path)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    if arguments.quick:
        vars(arguments).update(QUICK)
    engine = EngineSettings(model=arguments.model)
    target = load_target(resolve_model(arguments.model), engine, engine.torch_device)
    if target.tokenizer is None:
        raise ConfigError(f"--model: {arguments.model} has no tokenizer; give a folder that holds one")
    given = read_prompts(arguments.prompts)[: arguments.num_prompts]
    prompts = [encode_prompt(target.tokenizer, prompt) for prompt in given]
    start = time.monotonic()
    num_left = 0
    for text in arguments.loads:
        settings = _settings(engine, prompts, parse_offered_load(text), arguments)
        folder = arguments.output / text.replace("=", "-").replace(",", "-")
        num_left += _measure(settings, target, folder, lambda: time.monotonic() - start > 60 * arguments.minutes)
    if num_left:
        return STILL_TO_DO
    missed = _report(arguments)
    return 0 if arguments.quick else missed  # so few configurations are run as quickly as they are simulated


def _settings(
    engine: EngineSettings, prompts: Sequence[list[int]], load: OfferedLoad, arguments: argparse.Namespace
) -> TuningSettings:
    names = QUICK_SPECULATION if arguments.quick else tuple(SPECULATION)
    limits = BatchLimits(max_num_seqs=engine.max_num_seqs, max_num_batched_tokens=engine.max_num_batched_tokens)
    return TuningSettings(
        engine=engine,
        workload=TuningWorkload(prompts=prompts, load=load, max_tokens=arguments.max_tokens, temperature=0.0, sla=None),
        space=SearchSpace(speculation={name: SPECULATION[name] for name in names}, limits=[limits]),
        objective=Objective.LATENCY if load.concurrency is None else Objective.THROUGHPUT,
        rounds=arguments.rounds,
    )


def _measure(settings: TuningSettings, target: LoadedTarget, path: Path, is_time_up: Callable[[], bool]) -> int:
    """Tune, then sweep; return how many runs are still to be done."""
    workload, identity = settings.workload, identity_of(settings, target)
    tuned = TuningFolder(path / "tuned", identity)
    with Console(stderr=True).status("starting") as status:
        tuner = Tuner(settings=settings, folder=tuned, load_target=lambda _: target, progress=status.update)
        if not (tuned.path / REPORT_FILE).exists():
            if is_time_up():
                return len(settings.space.all()) * settings.rounds
            write(tuned.path / REPORT_FILE, tuner.tune().to_json())
        real = RealRuns(
            target=target,
            settings=settings.engine,
            workload=workload,
            texts=read_recording(tuned.recording(None)).texts,
            meter=EnergyMeter.of_this_machine(),
        )

        def run(candidate: Candidate, number: int) -> RunFigures:
            status.update(f"sweep, round {number + 1}: {candidate.name}")
            return real.run(candidate, number)

        # all ways to draft, at their one limit, and what the tuning made of them
        return sweep(
            [one.candidate for one in tuned.screened() or ()],
            run,
            SweepFile(path / "sweep.json"),
            identity,
            rounds=settings.rounds,
            is_time_up=is_time_up,
        )


def identity_of(settings: TuningSettings, target: LoadedTarget) -> dict[str, Any]:
    """What was measured, and where: runs of anything else are not mixed with these."""
    workload = settings.workload
    return {
        "model": settings.engine.model,
        "machine": describe_machine(target.model.device),
        "load": workload.load.to_json(),
        "prompts": f"{len(workload.prompts)}, {digest(workload.prompts)}",
        "max_tokens": workload.max_tokens,
        "space": settings.space.to_json(),
        "objective": str(settings.objective),
        "rounds": settings.rounds,
    }


def _report(arguments: argparse.Namespace) -> int:
    """Print and write the comparisons of all complete loads; 1 if one misses a goal."""
    found: list[TuningComparison] = []
    for file in sorted(arguments.output.glob("*/sweep.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        tuned = json.loads((file.parent / "tuned" / REPORT_FILE).read_text(encoding="utf-8"))
        rounds = rounds_of(content["runs"])
        whole = len(content["runs"]) == content["sweep"]["rounds"] * len(tuned["screened"])
        if whole:
            objective = Objective(content["sweep"]["objective"])
            found.append(compare(tuned["load"], objective, rounds, seconds_of(content["runs"]), tuned))
    if not found:
        raise ConfigError(f"report: {arguments.output} holds no complete sweep yet; run it on")
    write(arguments.output / "comparison.json", [one.to_json() for one in found])
    _show(found, Console(width=160, highlight=False))
    return int(not all(one.keeps_goals for one in found))


def _show(found: Sequence[TuningComparison], console: Console) -> None:
    table = Table(title="what forerun tune chose, by the runs of the exhaustive sweep")
    for name in (
        "load",
        "configurations",
        "best of the sweep",
        "tuned",
        "of the best",
        "sweep s",
        "tune s",
        "of its time",
    ):
        table.add_column(name, justify="left" if name in ("load", "best of the sweep", "tuned") else "right")
    for one in found:
        table.add_row(
            one.load,
            str(one.num_configurations),
            one.best,
            one.tuned,
            f"{one.share:.3f}",
            f"{one.sweep_seconds:.0f}",
            f"{one.tune_seconds:.0f}",
            f"{one.share_of_time:.2f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
