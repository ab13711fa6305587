"""Output that several commands share: JSON files, pictures, progress, and how well drafting worked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cyclopts import Parameter
from rich.console import Console

from forerun.bench.instruments import Progress
from forerun.cli.options import JsonFlag
from forerun.core.stats import SpeculationStats
from forerun.errors import ConfigError

PICTURE_FORMATS = (".png", ".svg", ".pdf")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Where the figures of a benchmark are written."""

    output_json: Path | None = None
    """Write all figures to this file, as JSON."""
    json_output: JsonFlag = False
    """Print one line of JSON for machines, and nothing else, on standard output."""

    def __post_init__(self) -> None:
        if self.output_json is not None and (self.output_json.is_dir() or not self.output_json.parent.is_dir()):
            raise ConfigError(f"--output-json: cannot write {self.output_json}; give a file in a folder that exists")

    def write(self, figures: Mapping[str, Any]) -> None:
        """Write the figures as JSON to the file and standard output, as far as the options ask for it."""
        if self.output_json is not None:
            self.output_json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        if self.json_output:
            print(json.dumps(figures))


REPORT = ReportOptions()


@contextmanager
def status() -> Iterator[Progress]:
    """Show how far a measurement is on one line of stderr, if that is a terminal."""
    with Console(stderr=True, highlight=False).status("starting") as shown:
        yield shown.update


def check_picture(option: str, picture: Path | None) -> None:
    """Refuse a picture file that could not be written after the measurement.

    Raises:
        ConfigError: the file's ending or folder is wrong, or matplotlib is missing.
    """
    if picture is None:
        return
    if picture.suffix not in PICTURE_FORMATS or picture.is_dir() or not picture.parent.is_dir():
        raise ConfigError(
            f"{option}: cannot write {picture}; give a file that ends in {', '.join(PICTURE_FORMATS)}, in a folder that exists"
        )
    if find_spec("matplotlib") is None:
        raise ConfigError(
            f"{option}: matplotlib is not installed; pip install 'forerun[bench]', or leave the picture out"
        )


def speculation_json(stats: SpeculationStats) -> dict[str, object]:
    """Counts and rates of speculation as JSON, in total and by drafter; a rate without data is null."""
    return {
        **_counts_json(stats),
        "by_drafter": {drafter: _counts_json(counts) for drafter, counts in stats.by_drafter.items()},
    }


def _counts_json(stats: SpeculationStats) -> dict[str, object]:
    return {
        "num_steps": stats.num_steps,
        "num_drafts": stats.num_drafts,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "acceptance_rate": stats.acceptance_rate,
        "acceptance_length": stats.acceptance_length,
        "acceptance_per_position": stats.acceptance_per_position,
    }


def speculation_rows(stats: SpeculationStats) -> list[tuple[str, str]]:
    """Name and value of the figures that show how well drafting worked."""
    length = stats.acceptance_length
    per_position = " ".join(f"{share:.0%}" for share in stats.acceptance_per_position)
    return [
        ("acceptance rate (accepted / drafted)", _acceptance(stats)),
        ("acceptance length (tokens per step)", "-" if length is None else f"{length:.2f}"),
        ("acceptance per position", per_position or "-"),
        *((f"accepted from {drafter}", _share_of(counts)) for drafter, counts in stats.by_drafter.items()),
    ]


def _acceptance(stats: SpeculationStats) -> str:
    return "-" if stats.acceptance_rate is None else f"{stats.acceptance_rate:.1%}"


def _share_of(stats: SpeculationStats) -> str:
    """The accepted tokens of one of several drafters."""
    tokens = f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} tokens"
    return f"{tokens} in {stats.num_drafts} drafts ({_acceptance(stats)})"
