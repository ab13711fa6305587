"""Which table of tiles the GPU's kernels use: the one that is named, else the one that was measured on this GPU, else none."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from forerun.config.settings import EngineSettings
from forerun.ops.cuda.system import GPU, CudaSystem
from forerun.ops.cuda.tiles import TileTable, use_table

logger = logging.getLogger(__name__)


def table_file(folder: Path, gpu: GPU, triton: str) -> Path:
    """Where the table of a GPU and a version of triton lies in a cache folder."""
    name = re.sub(r"[^a-z0-9.]+", "-", f"{gpu.name} triton {triton}".lower()).strip("-")
    return folder / "kernel-tables" / f"{name}.json"


def find_table(named: Path | None, system: CudaSystem, index: int, *, folder: Path) -> tuple[Path, TileTable] | None:
    """The table for a GPU and where it was found; None: there is none, and the rule decides.

    Args:
        named: a file that the user names.
        system: what is installed, triton too.
        index: of the GPU.
        folder: the cache, where `forerun tune-kernels` writes.

    Raises:
        ConfigError: the table is damaged, or for another GPU or version of triton.
    """
    gpu, triton = system.gpu(index), system.triton
    if triton is None:
        return None
    path = named or table_file(folder, gpu, triton)
    if named is None and not os.path.exists(path):  # nor in a folder that may not be searched
        return None
    table = TileTable.read(path)
    table.check_fits(gpu, triton, source=str(path))
    return path, table


def use_kernel_table(settings: EngineSettings, system: CudaSystem, index: int, *, folder: Path) -> None:
    """Let the kernels of a GPU cut their products by the table that there is for it, and say in the log which that is.

    Raises:
        ConfigError: the table is damaged or for another GPU, or this process uses another.
    """
    named = None if settings.kernel_table is None else Path(settings.kernel_table).expanduser()
    found = find_table(named, system, index, folder=folder)
    use_table(None if found is None else found[1])
    logger.info("kernel table: %s", describe_table(found))


def describe_table(found: tuple[Path, TileTable] | None) -> str:
    """For the log and for reports of errors: equal texts need an equal digest."""
    return "none, the built-in rule" if found is None else f"{found[0]} ({found[1]})"
