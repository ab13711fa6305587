"""How products are cut into tiles on a GPU: by a rule, or by a table that was measured on it. Nothing here imports triton.

Either is a function of a weight's shape alone, so that a row's sums have one order whatever is computed beside it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forerun.core.file_version import is_version
from forerun.core.whole_file import whole_file
from forerun.errors import ConfigError, one_line
from forerun.ops.cuda.system import GPU

FORMAT = 1  # of a table's file

_OUTPUTS, _INPUTS = 64, 64  # of a program, of a step: on an H200 the fastest for all shapes that were tried
_WANTED_PROGRAMS = 256  # about two for each multiprocessor of an H200; constant, whatever GPU runs
_LEAST_INPUTS = 512  # of a part
_MOST_SPLITS = 8

Shape = tuple[int, int]
"""A weight's [outputs, inputs]."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a weight's product is cut: outputs of a program, inputs of a step, parts of the inputs."""

    outputs: int
    inputs: int
    splits: int

    def __str__(self) -> str:
        return f"{self.outputs} outputs, {self.inputs} inputs, {self.splits} parts"


def rule_of(num_outputs: int, num_inputs: int) -> Tiles:
    """The tiles of a weight [num_outputs, num_inputs] that nobody has measured."""
    splits = 1
    wanted = _OUTPUTS * _WANTED_PROGRAMS
    while num_outputs * splits < wanted and splits < _MOST_SPLITS and num_inputs >= 2 * splits * _LEAST_INPUTS:
        splits *= 2
    return Tiles(outputs=_OUTPUTS, inputs=_INPUTS, splits=splits)


def tiles_of(num_outputs: int, num_inputs: int) -> Tiles:
    """The tiles of a weight [num_outputs, num_inputs], by the table in use, else by the rule."""
    return _tiles.get((num_outputs, num_inputs)) or rule_of(num_outputs, num_inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class TileTable:
    """Tiles that were measured on one kind of GPU with one version of triton, by the shape of the weight.

    Attributes:
        gpu: the GPU's name.
        capability: its compute capability.
        triton: the version.
        tiles: of each shape; others follow the rule.
    """

    gpu: str
    capability: tuple[int, int]
    triton: str
    tiles: Mapping[Shape, Tiles]

    @property
    def digest(self) -> str:
        """By which tables are told apart: texts are equal where it is, and GPU and triton are the same."""
        content = json.dumps(self._content(), sort_keys=True).encode()
        return hashlib.sha256(content).hexdigest()[:16]

    def __str__(self) -> str:
        count = len(self.tiles)
        return f"{count} {'shape' if count == 1 else 'shapes'}, digest {self.digest}"

    def check_fits(self, gpu: GPU, triton: str, *, source: str) -> None:
        """Look whether the table is for this GPU and this triton.

        Raises:
            ConfigError: it is for others.
        """
        own = (self.gpu, tuple(self.capability), self.triton)
        if own != (gpu.name, gpu.capability, triton):
            raise ConfigError(
                f"{source}: is for {_describe(*own)}, here is {_describe(gpu.name, gpu.capability, triton)}; "
                'make one with "forerun tune-kernels", or leave it out'
            )

    def write(self, path: Path) -> None:
        """Write the table as JSON; a reader never sees half of it.

        Raises:
            ConfigError: the file cannot be written.
        """
        text = json.dumps(self._content() | {"digest": self.digest}, indent=1) + "\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as part:
                part.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written ({error.strerror or error}); give another file") from None

    @classmethod
    def read(cls, path: Path) -> TileTable:
        """Read a table.

        Raises:
            ConfigError: it is not there, damaged, or of another format.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if not is_version(found["format"], FORMAT):
                raise ConfigError(
                    f'{path}: has format {found["format"]!r:.20}, must be {FORMAT}; make it anew with "forerun tune-kernels"'
                )
            table = cls(
                gpu=str(found["gpu"]),
                capability=(int(found["capability"][0]), int(found["capability"][1])),
                triton=str(found["triton"]),
                tiles=dict(_read_tiles(row) for row in found["tiles"]),
            )
        except ConfigError:
            raise
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror or error}); check the path") from None
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise _damaged(path, one_line(error)) from None
        if found.get("digest") != table.digest:
            raise _damaged(path, f"its digest is {table.digest}, the file says {found.get('digest')!r:.40}")
        return table

    def _content(self) -> dict[str, Any]:
        rows = [
            {"weight": list(shape)} | {f"tile_{name}": value for name, value in asdict(tiles).items()}
            for shape, tiles in sorted(self.tiles.items())
        ]
        capability = list(self.capability)
        return {"format": FORMAT, "gpu": self.gpu, "capability": capability, "triton": self.triton, "tiles": rows}


def use_table(table: TileTable | None) -> None:
    """Cut products by a table from now on, or by the rule alone; once products have been cut nothing else may be used.

    Raises:
        ConfigError: an engine in this process uses another.
    """
    global _in_use
    wanted = "none" if table is None else table.digest
    if _in_use not in (None, wanted):
        raise ConfigError(
            f"kernel_table: an engine in this process uses table {_in_use}, got {wanted}; texts of both would hang on who came "
            "last: use one table, or another process"
        )
    _in_use = wanted
    _tiles.clear()
    _tiles.update({} if table is None else table.tiles)


@contextmanager
def tiles_instead(shape: Shape, tiles: Tiles) -> Iterator[None]:
    """Cut the products of a shape so meanwhile, to measure it."""
    before = _tiles.get(shape)
    _tiles[shape] = tiles
    try:
        yield
    finally:
        del _tiles[shape]
        if before is not None:
            _tiles[shape] = before


def _read_tiles(row: Mapping[str, Any]) -> tuple[Shape, Tiles]:
    numbers = [*row["weight"], row["tile_outputs"], row["tile_inputs"], row["tile_splits"]]
    if len(numbers) != 5 or not all(type(number) is int and number > 0 for number in numbers):
        raise ValueError(f"no tiles: {row}")
    num_outputs, num_inputs, outputs, inputs, splits = numbers
    if outputs & (outputs - 1) or inputs & (inputs - 1) or min(outputs, inputs) < 16:
        raise ValueError(f"tiles must be powers of two of 16 or more: {row}")
    return (num_outputs, num_inputs), Tiles(outputs, inputs, splits)


def _damaged(path: Path, why: str) -> ConfigError:
    return ConfigError(f'{path}: is no table of tiles or damaged ({why}); make it anew with "forerun tune-kernels"')


def _describe(gpu: str, capability: tuple[int, ...], triton: str) -> str:
    return f"{gpu} (capability {'.'.join(map(str, capability))}) with triton {triton}"


_tiles: dict[Shape, Tiles] = {}
_in_use: str | None = None  # the digest of the table by which products have been cut, "none" for the rule
