"""`forerun models`: pulls and lists known models, and prints their folders."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from cyclopts import App
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from forerun.cli import loading
from forerun.cli.options import JsonFlag
from forerun.models import store
from forerun.models.store import StoredModel

models = App(
    name="models",
    help="Fetch known models, list them, say where they lie.",
    help_epilogue="Examples:\n  forerun models list\n  forerun models pull smollm2-135m\n  ls $(forerun models path smollm2-135m)",
)


@models.command
def pull(name: str, /, *, json_output: JsonFlag = False) -> None:
    """Download a known model, or check every file of the one that is there.

    Args:
        name: A name that "forerun models list" shows.
        json_output: Print one line of JSON for machines, and nothing else, on standard output.
    """
    folder = loading.pull(name)
    if json_output:
        print(json.dumps({"name": name, "path": str(folder), "state": "ready"}))
    else:
        print(f"{name} is ready in {folder}")


@models.command(name="list")
def list_models(*, json_output: JsonFlag = False) -> None:
    """Show the models that can be pulled, and which of them are ready.

    Args:
        json_output: Print one line of JSON for machines, and nothing else, on standard output.
    """
    rows = store.list_models()
    if json_output:
        print(json.dumps({"models": [_as_json(row) for row in rows]}))
        return
    table = Table("name", "model", "licence", "size", "state", "weights", box=None)
    for row in rows:
        table.add_row(row.name, row.title, row.licence, decimal(row.size_bytes), row.state, row.weights)
    Console().print(table)


@models.command
def path(name: str, /, *, json_output: JsonFlag = False) -> None:
    """Print the folder where a known model lies, or will lie once it is pulled.

    Args:
        name: A name that "forerun models list" shows.
        json_output: Print one line of JSON for machines, and nothing else, on standard output.
    """
    folder = store.model_path(name)
    print(json.dumps({"name": name, "path": str(folder)}) if json_output else folder)


def _as_json(row: StoredModel) -> dict[str, Any]:
    return asdict(row) | {"path": str(row.path)}
