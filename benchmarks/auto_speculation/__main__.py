"""Measures whether the method auto loses nowhere: against plain decoding and a sweep of static configurations.

python -m benchmarks.auto_speculation run --chat-prompts FILE --code-prompts FOLDER --output FILE.json
python -m benchmarks.auto_speculation report FILE.json [FILE.json ...]

`run` keeps each piece (one round of one workload, with plain decoding, the judged configuration and some of
the static ones) in --output as soon as it is measured; called again, it goes on where it was. The report
compares configurations within pieces only, so that a drift of the machine cancels.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks.auto_speculation.pieces import Piece, PieceFile
from benchmarks.auto_speculation.report import GOALS, problems, show, summaries
from benchmarks.auto_speculation.run import Configs, Runner, plan_turns
from benchmarks.auto_speculation.workloads import PromptFiles, WorkloadMaker
from benchmarks.command_line import STATIC_CONFIGS, STILL_TO_DO, add_prompt_files, run_command
from forerun.bench.compare import make_engine
from forerun.bench.machine import describe_kernels, describe_machine
from forerun.bench.outcomes import PLAIN
from forerun.build import load_target
from forerun.cli.input_files import read_configs
from forerun.config.settings import EngineSettings
from forerun.errors import ConfigError
from forerun.models.store import resolve_model

JUDGED = "auto"
"""The configuration that is held against the others; it needs no line in their file."""


def main() -> None:
    """Parse the arguments and run the command."""
    run_command(_parser(), {"run": _run, "report": _report})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.auto_speculation", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="measure, and write all figures as JSON")
    running.add_argument("--model", default="smollm2-135m", help="a folder or known name")
    add_prompt_files(running)
    running.add_argument("--configs", type=Path, default=STATIC_CONFIGS, help="names with a speculative_config each")
    running.add_argument(
        "--judged", default=JUDGED, help="the configuration that all pieces hold: auto, or one of the file"
    )
    running.add_argument("--static", nargs="*", help="names of the others to measure; all, if it is left out")
    running.add_argument("--static-at-once", type=int, default=4, help="of these in a piece")
    running.add_argument("--workloads", nargs="+", choices=[*GOALS], default=[*GOALS])
    running.add_argument("--num-prompts", type=int, help="of a workload with one sequence, the first ones")
    running.add_argument("--rounds", type=int, default=3)
    running.add_argument("--minutes", type=float, default=float("inf"), help="no piece begins after so many")
    running.add_argument("--output", type=Path, required=True)
    reporting = commands.add_parser("report", help="print tables of one or several runs' pieces")
    reporting.add_argument("runs", type=Path, nargs="+")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    known = {JUDGED: {"method": JUDGED}, **read_configs(arguments.configs)}
    configs = _choose(known, judged=arguments.judged, static=arguments.static)
    settings = EngineSettings(model=arguments.model)
    target = load_target(resolve_model(arguments.model), settings, settings.torch_device)
    if target.tokenizer is None:
        raise ConfigError(f"--model: {arguments.model} has no tokenizer; give a folder that holds one")
    files = PromptFiles(chat=arguments.chat_prompts, code=arguments.code_prompts)
    maker = WorkloadMaker(target.tokenizer, files, target.model.vocab_size)
    circumstances = {
        "model": arguments.model,
        "machine": describe_machine(settings.torch_device),
        "dtype": str(target.model.dtype).removeprefix("torch."),
        "kernels": describe_kernels(
            make_engine(PLAIN, target, replace(settings, enforce_eager=True), None, num_sequences=1, longest=16)
        ),
        "judged": arguments.judged,
        "prompts": files.digest(),
    }
    file = PieceFile(arguments.output)
    with Console(stderr=True).status("starting") as status:
        num_left = Runner(
            target=target,
            settings=settings,
            configs=configs,
            file=file,
            circumstances=circumstances,
            progress=status.update,
        ).run(
            [
                *plan_turns(
                    arguments.workloads,
                    [*configs],
                    judged=arguments.judged,
                    rounds=arguments.rounds,
                    static_at_once=arguments.static_at_once,
                )
            ],
            lambda name: maker.make(name).first(arguments.num_prompts),
            seconds=60 * arguments.minutes,
        )
    found = _show(file.read(), arguments.judged)
    if num_left:
        print(f"{num_left} piece(s) are still to be measured: run the same command again", file=sys.stderr)
    return found or (STILL_TO_DO if num_left else 0)


def _choose(configs: Configs, *, judged: str, static: list[str] | None) -> Configs:
    """The judged configuration and those of the others that are asked for."""
    names = [name for name in configs if name not in (judged, JUDGED)] if static is None else static
    for name in (judged, *names):
        if name not in configs:
            raise ConfigError(f"--judged, --static: got {name!r}; may be {', '.join(configs)}")
    return {name: configs[name] for name in (judged, *names)}


def _report(arguments: argparse.Namespace) -> int:
    files = [PieceFile(path) for path in arguments.runs]
    for file in files:
        if not file.path.exists():
            raise ConfigError(f"report: there is no file {file.path}; give the --output of a run")
        files[0].check(
            file.circumstances(), {name: config for piece in file.read() for name, config in piece.configs.items()}
        )
    return _show([piece for file in files for piece in file.read()], files[0].circumstances()["judged"])


def _show(pieces: list[Piece], judged: str) -> int:
    """Print the tables; the exit code is 1 if a text differs or a drafter failed."""
    found = summaries(pieces, judged)
    show(found, Console(width=200, highlight=False))
    return int(any(problems(found)))


if __name__ == "__main__":
    main()
