"""`forerun drafters`: lists the drafting methods and what each needs."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from forerun.cli.options import JsonFlag
from forerun.drafters.registry import DRAFTERS


def drafters(*, json_output: JsonFlag = False) -> None:
    """List the drafting methods: what each bets on, and whether it needs training or files.

    Args:
        json_output: Print one line of JSON for machines, and nothing else, on standard output.

    Examples:
        forerun drafters
        forerun drafters --json
    """
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
