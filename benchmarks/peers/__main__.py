"""Compares forerun with its peers in one interleaved run.

python -m benchmarks.peers install [PEER ...]
python -m benchmarks.peers run --code-prompts FOLDER --chat-prompts FILE --output FILE.json
python -m benchmarks.peers report FILE.json      writes FILE.md and FILE.svg
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.command_line import add_prompt_files, run_command, without_folder
from benchmarks.peers.engines import OTHERS, contenders_of
from benchmarks.peers.install import DEFAULT_FOLDER, TOOLS, InstallError, install
from benchmarks.peers.prompts import read_prompts
from benchmarks.peers.report import to_markdown
from benchmarks.peers.run import Record, Setup, run_all
from benchmarks.peers.schedule import make_cells
from forerun.bench.machine import describe_machine
from forerun.models.store import resolve_model
from forerun.models.tokenizer import load_tokenizer
from forerun.plan.profile import write_json


def main() -> None:
    """Parse the arguments and run the command."""
    run_command(_parser(), {"install": _install, "run": _run, "report": _report})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    installing = commands.add_parser("install", help="make the peers' virtual environments")
    installing.add_argument("peers", nargs="*", help=f"of {', '.join((*OTHERS, *TOOLS))}; all peers, if none is named")
    running = commands.add_parser("run", help="measure, and write all figures as JSON")
    running.add_argument("--model", default="smollm2-135m", help="a Llama, by its folder or known name")
    add_prompt_files(running)
    running.add_argument("--num-prompts", type=int, default=8, help="of each kind")
    running.add_argument("--rounds", type=int, default=3)
    running.add_argument("--threads", type=int, default=torch.get_num_threads())
    running.add_argument("--peers", nargs="*", choices=[*OTHERS], default=[*OTHERS], help="besides forerun")
    running.add_argument("--logs", type=Path, default=DEFAULT_FOLDER / "logs", help="what the workers print")
    running.add_argument("--output", type=Path, required=True)
    for command in (installing, running):
        command.add_argument("--venvs", type=Path, default=DEFAULT_FOLDER, help="where the environments are")
    commands.add_parser("report", help="write table and picture").add_argument("run", type=Path)
    return parser


def _install(arguments: argparse.Namespace) -> None:
    install(arguments.peers or OTHERS, arguments.venvs)


def _run(arguments: argparse.Namespace) -> None:
    model = resolve_model(arguments.model)
    prompts = read_prompts(
        load_tokenizer(model),
        code=arguments.code_prompts,
        chat=arguments.chat_prompts,
        count=arguments.num_prompts,
    )
    setup = Setup(model=model, environments=arguments.venvs, logs=arguments.logs, num_threads=arguments.threads)
    circumstances = {
        "model": arguments.model,
        "machine": describe_machine(torch.device("cpu")),
        "command": shlex.join(["python", "-m", "benchmarks.peers", *map(without_folder, sys.argv[1:])]),
        "num_threads": arguments.threads,
        "prompt_tokens": {kind: [len(prompt) for prompt in found] for kind, found in asdict(prompts).items()},
    }

    def keep(record: Record, num_rounds: int) -> None:
        write_json(arguments.output, {**circumstances, "rounds": num_rounds, **asdict(record)})

    with Console(stderr=True).status("starting") as status:
        run_all(
            contenders_of(arguments.peers),
            make_cells(prompts),
            setup=setup,
            rounds=arguments.rounds,
            progress=status.update,
            keep=keep,
        )


def _report(arguments: argparse.Namespace) -> None:
    try:
        from benchmarks.peers.picture import draw
    except ModuleNotFoundError as error:
        raise InstallError(
            f"report: got no {error.name}; needs the extra bench; pip install 'forerun[bench]'"
        ) from None
    run = json.loads(arguments.run.read_text())
    arguments.run.with_suffix(".md").write_text(to_markdown(run))
    draw(run, arguments.run.with_suffix(".svg"))


if __name__ == "__main__":
    main()
