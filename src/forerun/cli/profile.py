"""`forerun profile`: measures what simulation, plans and tuning compute with."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter, Token
from rich.console import Console
from rich.table import Table

from forerun.bench.profiling.stages import check_folder
from forerun.cli import loading
from forerun.cli.bench import parse_numbers
from forerun.cli.bench_compare import read_configs
from forerun.cli.command import command
from forerun.cli.input_files import Prompt, read_kinds
from forerun.cli.options import EngineOptions, JsonFlag
from forerun.cli.output import status
from forerun.errors import ConfigError
from forerun.plan.profile import PROFILE_FILE

if TYPE_CHECKING:
    from forerun.bench.profiling.grid import ProfileGrid
    from forerun.plan.profile import Profile

SECONDS_PER_UNIT = {"s": 1.0, "m": 60.0, "h": 3600.0}

DEFAULT_CONFIGS: dict[str, dict[str, Any]] = {
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
    "auto": {"method": "auto"},
}
"""What is profiled without --configs: drafters that need no files."""


def parse_duration(_hint: type[Any], tokens: Sequence[Token]) -> float:
    """Read a time with its unit: s, m or h.

    Raises:
        ValueError: it is no such time.
    """
    text = tokens[0].value
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if found is None or not float(found[1]):
        raise ValueError(f"got {text!r}; must be a time above 0 with its unit, e.g. 60s, 10m or 1h")
    return float(found[1]) * SECONDS_PER_UNIT[found[2]]


Numbers = Annotated[tuple[int, ...] | None, Parameter(converter=parse_numbers, n_tokens=1, negative=())]
Duration = Annotated[float | None, Parameter(converter=parse_duration, n_tokens=1, negative=())]


@Parameter(name="*", group=Group("Grid", sort_key=1))
@dataclass(frozen=True, kw_only=True)
class GridOptions:
    """What is measured; without any of these as much as the usual grid, or the budget, has."""

    input_lengths: Numbers = None
    """Tokens of the prompts whose first token is timed."""
    num_sequences: Numbers = None
    """Sequences that decode at once."""
    contexts: Numbers = None
    """Tokens of each of them."""
    draft_lengths: Numbers = None
    """Draft lengths K that are verified; 0 is always measured."""
    rounds: int | None = None
    """Rounds; each measures everything, in an order of its own."""
    num_texts: int | None = None
    """Prompts of each class that the model answers, at most, to judge drafters by."""
    max_tokens: int | None = None
    """Tokens of each answer."""

    def grid(self) -> ProfileGrid | None:
        """The grid asked for; None where nothing is."""
        from forerun.bench.profiling.grid import DEFAULT_GRID, GRIDS

        given = {name: getattr(self, name) for name in self.__dataclass_fields__ if getattr(self, name) is not None}
        if not given:
            return None
        if "draft_lengths" in given:
            given["draft_lengths"] = tuple({0, *given["draft_lengths"]})
        return replace(GRIDS[DEFAULT_GRID], **given)


@dataclass(frozen=True, kw_only=True)
class DrafterOptions:
    """What is drafted, and on what."""

    configs: Path | None = None
    """A YAML or JSON file of configurations to profile, as of "forerun bench compare"; by default suffix and auto."""
    prompts: Annotated[list[Path] | None, Parameter(consume_multiple=True, negative=())] = None
    """Files, each a class of prompts, as in "forerun bench compare"; by default built-in ones."""
    temperature: float = 0.0
    """Of the answers that drafters are judged by."""

    def kinds(self) -> Mapping[str, Sequence[Prompt]]:
        """The prompts by class."""
        from forerun.bench.prompts import WORKLOADS

        return WORKLOADS if self.prompts is None else read_kinds(self.prompts)


GRID, ENGINE, DRAFTERS = GridOptions(), EngineOptions(), DrafterOptions()


@command
def profile(
    model: str,
    /,
    *,
    output_dir: Path | None = None,
    budget: Duration = None,
    overwrite: Annotated[bool, Parameter(negative=())] = False,
    json_output: JsonFlag = False,
    drafters: Annotated[DrafterOptions, Parameter(name="*", group=Group("Drafters", sort_key=2))] = DRAFTERS,
    grid: GridOptions = GRID,
    engine: EngineOptions = ENGINE,
) -> None:
    """Measure a model on this machine: what steps take, what drafting costs and yields.

    The folder that it writes is what "forerun simulate", "forerun plan" and "forerun tune" compute with. An
    interrupted profile goes on where it stopped.

    Args:
        model: A folder, a .gguf file, a known name (see "forerun models list") or a hub id org/name.
        output_dir: The folder to write, by default profile-MODEL.
        budget: Measure as much as fits into this time, e.g. 60s or 10m, loading left out.
        overwrite: Begin anew, whatever the folder has.
        json_output: Print the profile as one line of JSON, and nothing else, on standard output.

    Examples:
        forerun profile smollm2-135m --budget 60s
        forerun profile smollm2-135m --configs drafters.yaml --prompts support.jsonl code.jsonl
    """
    from forerun.bench.profiling.grid import DEFAULT_GRID, GRIDS
    from forerun.bench.profiling.profiler import Profiler, ProfileTask  # torch: only when it is needed
    from forerun.bench.prompts import encode_prompt
    from forerun.config.settings import EngineSettings

    if budget is not None and grid != GRID:
        raise ConfigError("--budget: it chooses the grid, which other options give as well; leave one out")
    if engine.names_drafter or engine.no_speculation:
        raise ConfigError("--speculative-config: profile takes configurations from --configs; write this one there")
    named = DEFAULT_CONFIGS if drafters.configs is None else read_configs(drafters.configs)
    kinds = drafters.kinds()
    chosen = grid.grid() or (GRIDS[DEFAULT_GRID] if budget is None else None)
    settings = EngineSettings.from_keywords(model, engine.plain_settings())
    folder = Path(f"profile-{Path(model).name}") if output_dir is None else output_dir
    check_folder(folder, overwrite=overwrite)
    target = loading.load_target(settings)
    if target.tokenizer is None:
        raise ConfigError(f"prompts: {model} has no tokenizer to read them with; give a folder that holds one")
    token_ids = {kind: [encode_prompt(target.tokenizer, text) for text in some] for kind, some in kinds.items()}
    task = ProfileTask(
        settings=settings,
        configs=named,
        prompts=token_ids,
        grid=chosen,
        budget_seconds=budget,
        temperature=drafters.temperature,
    )
    with status() as progress:
        found = Profiler(
            target=target, task=task, folder=folder, overwrite=overwrite, progress=progress, announce=_announce
        ).run()
    if json_output:
        print(json.dumps(json.loads((folder / PROFILE_FILE).read_text(encoding="utf-8"))))
    else:
        _show(found, folder, Console(highlight=False))


def _announce(line: str) -> None:
    print(f"profile: {line}", file=sys.stderr)


def _show(found: Profile, folder: Path, console: Console) -> None:
    """Print what matters most, and where the rest is."""
    times = found.step_times
    table = Table(title=f"{found.model} on {found.machine}")
    for name in ("sequences", "step, ms", *(f"K = {k}" for k in (1, 3, 5))):
        table.add_column(name, justify="right")
    for count in (1, 4, 16):
        row = [
            f"{1e3 * times.seconds(num_rows=count * (k + 1), num_sequences=count, num_context_tokens=512 * count):.1f}"
            for k in (0, 1, 3, 5)
        ]
        table.add_row(str(count), *row)
    console.print(table)
    for name, acceptance in found.acceptance.items():
        rates = " ".join(f"{rate:.0%}" for rate in acceptance.marginal[:8])
        console.print(f"{name}: {acceptance.mean_accept_length:.2f} tokens per step; places stand {rates}")
    if times.error is not None:
        console.print(
            f"the model of step times is off by {times.error.median:.1%} (median), {times.error.p95:.1%} (p95)"
        )
    console.print(f"written to {folder}")
