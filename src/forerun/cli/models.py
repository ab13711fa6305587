"""`forerun models`: pulls and lists known models, prints their folders, and removes packed weights."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

from cyclopts import App, Parameter
from rich.filesize import decimal
from rich.table import Column, Table

from forerun.cli import pulling
from forerun.cli.console import plain_console, table_width
from forerun.cli.options import JsonFlag
from forerun.errors import ModelError
from forerun.models import store
from forerun.models.store import StoredModel

models = App(
    name="models",
    help="Fetch known models, list them, say where they lie; remove packed weights.",
    help_epilogue="Examples:\n  forerun models list\n  forerun models pull smollm2-135m\n  ls $(forerun models path smollm2-135m)\n  forerun models prune",
)


@models.command
def pull(name: str, /, *, json_output: JsonFlag = False) -> None:
    """Download a known model, or check every file of the one that is there.

    Args:
        name: A name that "forerun models list" shows.
        json_output: Print one line of JSON for machines, and nothing else, on standard output.
    """
    folder = pulling.pull(name)
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
    store.check_cache_folder()
    rows = store.list_models()
    if json_output:
        print(json.dumps({"models": [_as_json(row) for row in rows]}))
        return
    name = Column("name", no_wrap=True)  # users must type it
    table = Table(name, "model", "licence", "size", "state", "weights", box=None)
    for row in rows:
        table.add_row(row.name, row.title, row.licence, decimal(row.size_bytes), row.state, row.weights)
    plain_console(width=table_width()).print(table)


@models.command
def path(name: str, /, *, json_output: JsonFlag = False) -> None:
    """Print the folder where a known model lies, or will lie once it is pulled.

    Args:
        name: A name that "forerun models list" shows.
        json_output: Print one line of JSON for machines, and nothing else, on standard output.
    """
    folder = store.model_path(name)
    print(json.dumps({"name": name, "path": str(folder)}) if json_output else folder)


@models.command
def prune(
    *, everything: Annotated[bool, Parameter(name="--all", negative=())] = False, json_output: JsonFlag = False
) -> None:
    """Remove packed weights that no start can use any more: of models that are gone or changed, of another version.

    Packed weights are kept so that a model's next start need not pack them again. Models themselves stay.

    Args:
        everything: Remove those in use, too; the next start of each model packs its weights again.
        json_output: Print one line of JSON for machines, and nothing else, on standard output.
    """
    from forerun.models.packed_cache import PackedCache  # torch: only when it is needed

    store.check_cache_folder()
    cache = PackedCache.of_environment()
    try:
        removed, left = cache.prune(everything=everything), cache.num_bytes
    except OSError as error:
        raise ModelError(
            f"packed weights cannot be removed ({error}); run this as a user who may write to {cache.folder}"
        ) from error
    if json_output:
        print(
            json.dumps({"folder": str(cache.folder), "removed": [asdict(file) for file in removed], "bytes_left": left})
        )
        return
    for file in removed:
        print(f"{file.name}: {decimal(file.num_bytes)} removed; {file.reason}")
    print(f"{decimal(left)} of packed weights are left in {cache.folder}")
    if unfinished := cache.num_unfinished_bytes:
        print(
            f"{decimal(unfinished)} of them are being written now, or go an hour after a process that wrote them was killed"
        )


def _as_json(row: StoredModel) -> dict[str, Any]:
    return asdict(row) | {"path": str(row.path)}
