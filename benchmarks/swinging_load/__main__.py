"""Serves a load that swings between about 1 and 64 running requests, with each configuration in turn.

python -m benchmarks.swinging_load run --chat-prompts FILE --code-prompts FOLDER --output FILE.json
python -m benchmarks.swinging_load report FILE.json

Every run has a server of its own and the same arrivals, all of them faster or slower by its pace. --output
keeps each run as soon as it is measured; called again, the command goes on where it was.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.command_line import STATIC_CONFIGS, STILL_TO_DO, add_prompt_files, run_command
from benchmarks.prompt_files import first_turns, rename_wishes
from benchmarks.serving import serving
from benchmarks.swinging_load.arrivals import Swing, draw_arrivals
from benchmarks.swinging_load.loading import LoadResult, load_server, sum_up
from benchmarks.swinging_load.report import Runs, show
from forerun.bench.machine import describe_machine
from forerun.bench.outcomes import PLAIN
from forerun.cli.input_files import read_configs
from forerun.errors import ConfigError

AUTO = "auto"
NUM_WARMUPS = 8


def main() -> None:
    """Parse the arguments and run the command."""
    run_command(_parser(), {"run": _run, "report": _report})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.swinging_load", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="measure, and write all figures as JSON")
    running.add_argument("--model", default="smollm2-135m", help="a folder or known name")
    add_prompt_files(running)
    running.add_argument("--configs", type=Path, default=STATIC_CONFIGS, help="names with a speculative_config each")
    running.add_argument(
        "--only", nargs="*", help="names to measure besides plain: auto, or of the file; all, if it is left out"
    )
    running.add_argument(
        "--paces", type=float, nargs="+", default=[0.8, 1.0, 1.25], help="arrivals so many times as fast"
    )
    running.add_argument("--swings", type=int, default=2, help="quiet phases, each with a burst after it")
    running.add_argument("--burst-rate", type=float, default=Swing().burst_rate, help="requests per second")
    running.add_argument("--quiet-rate", type=float, default=Swing().quiet_rate)
    running.add_argument("--max-tokens", type=int, default=128, help="of each answer")
    running.add_argument("--max-num-seqs", type=int, default=64)
    running.add_argument("--rounds", type=int, default=2)
    running.add_argument("--seed", type=int, default=0, help="of arrivals and of the prompts' order")
    running.add_argument("--minutes", type=float, default=float("inf"), help="no run begins after so many")
    running.add_argument("--output", type=Path, required=True)
    reporting = commands.add_parser("report", help="print the tables of a run")
    reporting.add_argument("run", type=Path)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    configs = _choose({AUTO: {"method": AUTO}, **read_configs(arguments.configs)}, arguments.only)
    swing = Swing(quiet_rate=arguments.quiet_rate, burst_rate=arguments.burst_rate)
    times = draw_arrivals(swing, num_swings=arguments.swings, seed=arguments.seed)
    prompts = read_prompts(
        arguments.chat_prompts, arguments.code_prompts, count=len(times) + NUM_WARMUPS, seed=arguments.seed
    )
    circumstances = {
        "model": arguments.model,
        "machine": describe_machine(torch.device("cpu")),
        "swing": asdict(swing),
        "num_swings": arguments.swings,
        "seed": arguments.seed,
        "max_tokens": arguments.max_tokens,
        "max_num_seqs": arguments.max_num_seqs,
    }
    record = _open_record(arguments.output, circumstances, configs)
    start, num_left = time.monotonic(), 0
    for name, pace, number in _turns([*configs], arguments.paces, arguments.rounds):
        done = ((one["config"], one["pace"], one["round"]) for one in record["results"])
        if (name, pace, number) in done:
            continue
        if time.monotonic() - start >= 60 * arguments.minutes:
            num_left += 1
            continue
        print(f"round {number + 1}, pace {pace:g}: {name}", file=sys.stderr)
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(*_server_words(arguments, configs[name]), log=Path(folder) / "log") as server,
        ):
            answers, seconds = asyncio.run(
                load_server(
                    server.url,
                    arguments.model,
                    prompts,
                    [at / pace for at in times],
                    max_tokens=arguments.max_tokens,
                    num_warmups=NUM_WARMUPS,
                )
            )
        record["results"].append(sum_up(answers, seconds, config=name, pace=pace, round_number=number).to_json())
        _write(arguments.output, record)
    if num_left:
        print(f"{num_left} run(s) are still to be measured: give the same command again", file=sys.stderr)
    return _show(record) or (STILL_TO_DO if num_left else 0)


def _choose(configs: Mapping[str, dict[str, Any]], only: list[str] | None) -> dict[str, dict[str, Any] | None]:
    """Plain decoding, and the configurations that are asked for."""
    for name in only or ():
        if name not in configs:
            raise ConfigError(f"--only: got {name!r}; may be {', '.join(configs)}")
    return {PLAIN: None} | {name: config for name, config in configs.items() if only is None or name in only}


def _turns(configs: list[str], paces: list[float], rounds: int) -> list[tuple[str, float, int]]:
    """Configuration, pace and round of each run: all configurations one after the other, back in the next round."""
    return [
        (config, pace, number)
        for number in range(rounds)
        for pace in paces
        for config in (configs if number % 2 == 0 else configs[::-1])
    ]


def read_prompts(chat: Path, code: Path, *, count: int, seed: int) -> list[str]:
    """User messages, questions and wishes to edit code in turn, none twice: a drafter would know its answer.

    Raises:
        ConfigError: there are fewer than `count`.
    """
    questions = first_turns(chat)
    random.Random(seed).shuffle(questions)
    mixed = [one for one in chain.from_iterable(zip_longest(questions, islice(rename_wishes(code), count))) if one]
    if len(mixed) < count:
        raise ConfigError(f"prompts: got {len(mixed)}; {count} are needed; ask for fewer swings or give more prompts")
    return mixed[:count]


def _server_words(arguments: argparse.Namespace, config: dict[str, Any] | None) -> list[str]:
    """The arguments of `forerun serve`."""
    words = [arguments.model, f"--max-num-seqs={arguments.max_num_seqs}", "--max-model-len=2048"]
    speculation = ["--no-speculation"] if config is None else [f"--speculative-config={json.dumps(config)}"]
    return [*words, "--disable-log-stats", *speculation]


def _open_record(path: Path, circumstances: Mapping[str, Any], configs: Mapping[str, Any]) -> dict[str, Any]:
    """The runs so far, with their circumstances and all configurations, old and new.

    Raises:
        ConfigError: they were measured under other circumstances.
    """
    record = _read(path) or {**circumstances, "configs": {}, "results": []}
    for name, here in circumstances.items():
        if record[name] != here:
            raise ConfigError(f"--output: {path} has {name} {record[name]!r}, not {here!r}; give another file")
    for name, config in configs.items():
        if record["configs"].setdefault(name, config) != config:
            raise ConfigError(f"--output: {path} has another configuration {name}; give another file")
    return record


def _write(path: Path, record: Mapping[str, Any]) -> None:
    """Write all runs; an interruption leaves the file as it was."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(record, indent=1) + "\n")
    beside.replace(path)


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _report(arguments: argparse.Namespace) -> int:
    record = _read(arguments.run)
    if not record:
        raise ConfigError(f"report: there is no file {arguments.run}; give the --output of a run")
    return _show(record)


def _show(record: dict[str, Any]) -> int:
    """Print the tables; the exit code is 1 if a text differs."""
    runs = Runs([LoadResult(**one) for one in record["results"]])
    if runs.results:
        show(runs, Console(width=180, highlight=False))
    return int(any(runs.problems()))


if __name__ == "__main__":
    main()
