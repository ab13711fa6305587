"""Measures one engine by the environment's variables, or compares all engines; docs/experiment.md."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace

from rich.console import Console

from benchmarks.experiment.console import ExperimentConsole
from benchmarks.experiment.experiment import run
from benchmarks.experiment.plan import plan_comparison, plan_single, with_all_speculation
from benchmarks.experiment.settings import read_settings
from forerun.cli.loading import pull_if_needed
from forerun.errors import ForerunError

FELL_BACK, MISTAKE = 1, 2
"""Exit codes: a run without the requested speculation under --strict; a mistake of the user."""


def main() -> None:
    """Parse, measure, and exit with a code."""
    arguments = _parser().parse_args()
    given = {
        name: model
        for name, model in (("target_model", arguments.target_model), ("drafter_model", arguments.drafter_model))
        if model is not None
    }
    console = ExperimentConsole(Console())
    try:
        settings = replace(read_settings(os.environ), **given)
        runs = plan_comparison(console) if arguments.compare else plan_single(settings)
        settings = with_all_speculation(settings) if arguments.compare else settings
        pull_if_needed(settings.target_model)
        results = run(settings, runs, os.environ, console)
    except ForerunError as error:
        print(f"❌ {error}", file=sys.stderr)
        sys.exit(MISTAKE)
    if arguments.strict and any(result["effective_method"] != result["method"] for result in results):
        print("❌ --strict: a run fell back to target-only generation; see effective_method", file=sys.stderr)
        sys.exit(FELL_BACK)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks/run_benchmark.sh", description=__doc__)
    parser.add_argument("--compare", action="store_true", help="every engine installed, plain and speculative")
    parser.add_argument("--strict", action="store_true", help="exit with code 1 if a run fell back to target-only")
    parser.add_argument("--target-model", help="instead of TARGET_MODEL")
    parser.add_argument("--drafter-model", help="instead of DRAFTER_MODEL")
    return parser


if __name__ == "__main__":
    main()
