"""`forerun drafters`: lists the drafting methods and what each needs, or what "auto" uses for a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from forerun.cli import loading
from forerun.cli.command import command
from forerun.cli.options import EngineOptions, JsonFlag
from forerun.drafters.registry import DRAFTERS
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.drafters.base import Choice

ENGINE = EngineOptions()


@command
def drafters(
    *,
    model: Annotated[str | None, Parameter(name="--for")] = None,
    json_output: JsonFlag = False,
    engine: EngineOptions = ENGINE,
) -> None:
    """List the drafting methods: what each bets on, and whether it needs training or files.

    Args:
        model: A folder, a .gguf file, a known name or a hub id org/name: say instead what the method "auto" uses
            for this model, and why not the others. The model is loaded with the engine's options.
        json_output: Print one line of JSON for machines, and nothing else, on standard output.

    Examples:
        forerun drafters
        forerun drafters --json
        forerun drafters --for smollm2-135m
        forerun drafters --for smollm2-135m --speculative-config.method auto --speculative-config.auto-memory 1.0
    """
    if model is not None:
        _show_choices(model, engine, json_output=json_output)
        return
    if engine.no_speculation:
        raise ConfigError("--no-speculation: nothing is written here, with drafts or without; leave it out")
    if engine.names_drafter:
        raise ConfigError("--speculative-config: is about one model; name it with --for")
    if json_output:
        print(json.dumps({method: asdict(row.info) for method, row in DRAFTERS.items()}))
        return
    table = Table.grid(padding=(0, 2))
    for method, row in DRAFTERS.items():
        info = row.info
        table.add_row(f"[bold]{method}[/]", "bets on", info.bets_on)
        for name, value in (("training", info.training), ("trees", info.trees), ("loads", info.files)):
            table.add_row("", f"[dim]{name}[/]", value)
        table.add_row("", "[dim]paper[/]", info.paper, end_section=True)
        table.add_row()
    Console(highlight=False).print(table)


def _show_choices(model: str, engine: EngineOptions, *, json_output: bool) -> None:
    """Print what "auto" uses for a model."""
    llm = loading.load_llm(model, engine.with_default_speculation("auto", need="--for asks what drafts"))
    choices = llm.drafter_choices()
    if json_output:
        default = "auto" if llm.is_batch_invariant else None
        print(json.dumps({"model": model, "default": default, "auto": [asdict(choice) for choice in choices]}))
        return
    console = Console(highlight=False)
    console.print(_choices_table(choices))
    console.print(
        "auto is the default here: drafts change no text in any bit"
        if llm.is_batch_invariant
        else "nothing is drafted by default here, as drafts might change texts at near-ties; turn it on with --speculative-config auto"
    )


def _choices_table(choices: Sequence[Choice]) -> Table:
    table = Table.grid(padding=(0, 2))
    for choice in choices:
        table.add_row(f"[bold]{choice.method}[/]", "used" if choice.is_used else "[dim]not used[/]", choice.why)
    return table
