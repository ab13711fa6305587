"""`forerun drafters`: lists the drafting methods and what each needs, or what "auto" uses for a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from forerun.cli import loading
from forerun.cli.command import command
from forerun.cli.console import plain_console
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
    given = [field.name for field in fields(engine) if getattr(engine, field.name) != getattr(ENGINE, field.name)]
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(
            f"{options}: given without a model, to which it applies; name one with --for, or leave it out"
        )
    if json_output:
        print(json.dumps({method: asdict(row.info) for method, row in DRAFTERS.items()}))
        return
    table = Table.grid(padding=(0, 2))
    for method, row in DRAFTERS.items():
        info = row.info
        table.add_row(Text(method, style="bold"), "bets on", info.bets_on)
        others = {"training": info.training, "trees": info.trees, "loads": info.files, "paper": info.paper}
        for name, value in others.items():
            table.add_row("", Text(name, style="dim"), value)
        table.add_row()
    plain_console().print(table)


def _show_choices(model: str, engine: EngineOptions, *, json_output: bool) -> None:
    """Print what "auto" uses for a model."""
    llm = loading.load_llm(model, engine.with_default_speculation("auto", need="--for asks what drafts"))
    choices = llm.drafter_choices()
    if json_output:
        default = "auto" if llm.is_batch_invariant else None
        print(json.dumps({"model": model, "default": default, "auto": [asdict(choice) for choice in choices]}))
        return
    console = plain_console()
    console.print(_choices_table(choices))
    console.print(
        "auto is the default here: drafts change no text in any bit"
        if llm.is_batch_invariant
        else "nothing is drafted by default here, as drafts might change texts at near-ties; turn it on with --speculative-config auto"
    )


def _choices_table(choices: Sequence[Choice]) -> Table:
    table = Table.grid(padding=(0, 2))
    for choice in choices:
        used = Text("used") if choice.is_used else Text("not used", style="dim")
        table.add_row(Text(choice.method, style="bold"), used, choice.why)
    return table
