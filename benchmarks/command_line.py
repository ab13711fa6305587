"""What the command lines of benchmarks share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from forerun.errors import ForerunError

STATIC_CONFIGS = Path(__file__).parent / "configs" / "static-speculation.yaml"
"""The sweep that the method auto is held against."""

OWN_VARIABLES = ("FORERUN_CACHE", "FORERUN_CPU_KERNELS", "FORERUN_PACKED_CACHE_GB")
"""What forerun reads of its environment besides the options of its commands."""

STILL_TO_DO = 3
"""Exit code of a `run` if time was up before everything was measured."""


def run_command(
    parser: argparse.ArgumentParser, commands: Mapping[str, Callable[[argparse.Namespace], int | None]]
) -> None:
    """Parse the arguments, run the command that they name and exit with its code; 2 if it cannot do what it is asked for."""
    arguments = parser.parse_args()
    try:
        sys.exit(commands[arguments.command](arguments))
    except ForerunError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def without_folder(argument: str) -> str:
    """A path's last part, since the machine's folders are not to be published."""
    return Path(argument).name if "/" in argument else argument


def add_prompt_files(parser: argparse.ArgumentParser) -> None:
    """Add the options of the prompt sets, which are never part of the project."""
    parser.add_argument("--chat-prompts", type=Path, required=True, help='a .jsonl file of {"turns": [...]}')
    parser.add_argument("--code-prompts", type=Path, required=True, help="a folder of .py or .jsonl.gz files")
