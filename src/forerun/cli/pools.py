"""`forerun pools`: shows, copies out and copies in what drafters remember of past requests."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import App
from rich.filesize import decimal
from rich.table import Table

from forerun.cli.command import examples
from forerun.cli.console import plain_console
from forerun.cli.options import Flag, JsonFlag
from forerun.core.writable import check_writable_file
from forerun.errors import ConfigError
from forerun.models import store

if TYPE_CHECKING:
    from forerun.drafters.pool_files import ModelIdentity, SavedPools

pools = App(
    name="pools",
    help="Show, copy out and copy in what drafters remember of past requests.",
    help_epilogue=examples(
        "  forerun pools show ~/pools\n"
        "  forerun pools export smollm2-135m warm.pools --pools-folder ~/pools --shared-only\n"
        "  forerun pools import smollm2-135m warm.pools --pools-folder ~/pools"
    ),
)


@dataclass(frozen=True, slots=True)
class Row:
    """What a file holds of one kind of pool."""

    file: str
    model: str
    fingerprint: str
    kind: str
    num_salts: int  # besides the part without a salt
    num_bytes: int


@pools.command
def show(path: Path, /, *, json_output: JsonFlag = False) -> None:
    """Show what lies in a folder or a file of pools.

    Args:
        path: A folder given as --pools-folder, or a file that "forerun pools export" wrote.
        json_output: Print one line of JSON for machines, and nothing else, on standard output.
    """
    path = path.expanduser()
    rows, problems = _rows(path)
    if problems and not path.is_dir():
        raise ConfigError(problems[0])
    if json_output:
        print(json.dumps({"pools": [asdict(row) for row in rows], "unusable": problems}))
        return
    table = Table("file", "model", "kind", "salts", "size", box=None)
    for row in rows:
        table.add_row(row.file, row.model, row.kind, str(row.num_salts), decimal(row.num_bytes))
    console = plain_console()
    console.print(table)
    for problem in problems:
        console.print(f"unusable: {problem}")


@pools.command
def export(model: str, file: Path, /, *, pools_folder: Path, shared_only: Flag = False) -> None:
    """Copy a model's pools out of a folder into a file, which another machine can take in.

    Args:
        model: The model, as for "forerun serve".
        file: The file to write.
        pools_folder: The folder given as --pools-folder.
        shared_only: Leave out what was learnt from requests with a cache salt.
    """
    from forerun.drafters.pool_files import file_of, write_pools

    check_writable_file("FILE", file)
    saved = _read(file_of(pools_folder.expanduser(), _identity(model)), model)
    if shared_only:
        saved = saved.shared
    _write(write_pools, file, saved)
    print(f"{file} holds {_named(saved)} of {model}")


@pools.command(name="import")
def import_pools(model: str, file: Path, /, *, pools_folder: Path) -> None:
    """Take a file of pools into a folder; kinds of pools that it holds replace those that are there.

    Args:
        model: The model, as for "forerun serve"; the file must be of the same.
        file: A file that "forerun pools export" wrote.
        pools_folder: The folder that will be given as --pools-folder.
    """
    from forerun.drafters.pool_files import PoolFileError, check_model, file_of, put_aside, read_pools, write_pools

    identity = _identity(model)
    saved = read_pools(file)
    check_model(file, saved.model, identity)
    target = file_of(pools_folder.expanduser(), identity)
    there: Mapping[str, Any] = {}
    if target.exists():
        try:
            there = read_pools(target).kinds
        except PoolFileError as error:
            try:
                aside = put_aside(target)
            except OSError as refusal:
                raise ConfigError(f"{error}, nor renamed ({refusal}); delete it") from refusal
            print(f"warning: {error}; it lies in {aside} now", file=sys.stderr)
    _write(write_pools, target, replace(saved, kinds={**there, **saved.kinds}))
    print(f"{target} holds {_named(saved)} of {file}")


def _identity(model: str) -> ModelIdentity:
    """The identity of a model by its files; its weights are not loaded."""
    from forerun.drafters.pool_files import ModelIdentity
    from forerun.models.fingerprint import fingerprint_of_files

    path = store.resolve_model(model)
    return ModelIdentity(fingerprint=fingerprint_of_files(path), name=Path(model).name)


def _read(path: Path, model: str) -> SavedPools:
    from forerun.drafters.pool_files import read_pools

    if not path.exists():
        raise ConfigError(f"--pools-folder: no pools of {model} in {path.parent}; serve it with this folder first")
    return read_pools(path)


def _write(write: Any, path: Path, saved: SavedPools) -> None:
    try:
        write(path, saved)
    except OSError as error:
        raise ConfigError(f"cannot write {path} ({error}); give a place that can be written") from error


def _named(saved: SavedPools) -> str:
    return f"the pools {', '.join(saved.kinds)}" if saved.kinds else "no pools"


def _rows(path: Path) -> tuple[list[Row], list[str]]:
    """A row for each kind of pool in each file, and what is wrong with those that cannot be read."""
    from forerun.drafters.pool_files import PoolFileError, read_pools

    if not path.exists():
        raise ConfigError(f"PATH: got {path}, which is not there; give a folder or a file of pools")
    rows: list[Row] = []
    problems: list[str] = []
    for file in sorted(path.glob("*.pools")) if path.is_dir() else [path]:
        try:
            saved = read_pools(file)
        except PoolFileError as error:
            problems.append(str(error))
            continue
        for kind, sections in saved.kinds.items():
            num_bytes = sum(array.nbytes for arrays in sections.values() for array in arrays.values())
            num_salts = sum(salt is not None for salt in sections)
            rows.append(Row(str(file), saved.model.name, saved.model.fingerprint, kind, num_salts, num_bytes))
    return rows, problems
