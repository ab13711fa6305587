"""Where the figures of `forerun bench` go, and how it tells how far it is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import Group, Parameter
from rich.console import Console

from forerun.cli.options import JsonFlag
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.bench.progress import Progress

WORKLOAD = Parameter(name="*", group=Group("Workload", sort_key=1), negative=())


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Where the figures go."""

    output_json: Path | None = None
    """Write all figures to this file, as JSON."""
    json_output: JsonFlag = False
    """Print one line of JSON for machines, and nothing else, on standard output."""

    def __post_init__(self) -> None:
        if self.output_json is not None and (self.output_json.is_dir() or not self.output_json.parent.is_dir()):
            raise ConfigError(f"--output-json: cannot write {self.output_json}; give a file in a folder that exists")

    def write(self, figures: Mapping[str, Any]) -> None:
        """Write the JSON that was asked for."""
        if self.output_json is not None:
            self.output_json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        if self.json_output:
            print(json.dumps(figures))


REPORT = ReportOptions()


@contextmanager
def status() -> Iterator[Progress]:
    """A line on stderr that tells how far a measurement is, on a terminal."""
    with Console(stderr=True, highlight=False).status("starting") as shown:
        yield shown.update
