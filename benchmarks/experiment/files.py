"""The files that an experiment writes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.experiment.engines import num_visible_gpus
from benchmarks.experiment.results import SCHEMA_VERSION
from benchmarks.experiment.settings import Settings
from forerun.bench.machine import describe_machine
from forerun.errors import ConfigError


def output_file(settings: Settings, key: str) -> Path:
    """OUTPUT_FILE with a run's key before its ending."""
    file = Path(settings.output_file).expanduser()
    return file.with_name(f"{file.name.removesuffix('.json')}_{key}.json")


def check_output(file: Path) -> None:
    """Refuse a folder that cannot be written to, before anything is measured.

    Raises:
        ConfigError: it is none, or belongs to others.
    """
    folder = file.expanduser().parent
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"OUTPUT_FILE: got {str(file)!r}; {folder} is no folder that can be written to; make it so")


def write_results(file: Path, results: Mapping[str, Any], settings: Settings, warnings: Sequence[str]) -> None:
    """Results by run, and what they were measured with."""
    about = {
        "schema_version": SCHEMA_VERSION,
        "environment": {
            "machine": describe_machine(torch.device("cuda" if num_visible_gpus() else "cpu")),
            "num_threads": torch.get_num_threads(),
            "variables": {name.upper(): value for name, value in asdict(settings).items()},
        },
        "warnings": list(warnings),
    }
    write_json(file, {**results, **about})


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write readable JSON."""
    file.write_text(json.dumps(content, indent=1) + "\n")
