"""`forerun tune-kernels`: measures on the GPU at hand how its kernels best cut a model's products, and writes that down."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from forerun.cli import loading
from forerun.cli.command import command
from forerun.cli.options import JsonFlag
from forerun.core.cache_folder import cache_folder
from forerun.errors import ConfigError
from forerun.models import store

if TYPE_CHECKING:
    from forerun.bench.kernel_tuning import Meter, TunedShape
    from forerun.ops.cuda.system import GPU, CudaSystem
    from forerun.ops.cuda.tiles import Shape, Tiles


@command
def tune_kernels(
    model: str,
    /,
    *,
    output: Path | None = None,
    device: str = "cuda",
    rounds: Annotated[int, Parameter(negative=())] = 3,
    json_output: JsonFlag = False,
) -> None:
    """Measure on this GPU how the kernels best cut a model's matrix products, and write a table of it.

    Engines on this GPU with this version of triton then use the table. What is chosen depends on a weight's shape
    alone, so drafts change no text; but texts with another table may differ, as those on another GPU do. Shapes that an
    earlier run has tuned stay in the table unless this model has them too.

    Args:
        model: A folder, a .gguf file, a known name (see "forerun models list") or a hub id org/name; its weights are not read.
        output: File to write; by default in the cache folder, where engines look for it.
        device: The GPU: cuda or cuda:N.
        rounds: Times that each of the best candidates is measured; the least time counts.
        json_output: Print one line of JSON for machines, and nothing else, on standard output.

    Examples:
        forerun tune-kernels smollm2-135m
        forerun tune-kernels smollm2-135m --output h200.json
    """
    from forerun.config.device import OR_CPU, check_triton, choose_device
    from forerun.executor.host_copies import as_current
    from forerun.ops.cuda.system import InstalledCuda

    if rounds < 1:
        raise ConfigError(f"--rounds: got {rounds}; must be 1 or more")
    if not re.fullmatch(r"cuda(:\d+)?", device):
        raise ConfigError(f"--device: got {device!r}; kernels are tuned on a GPU: cuda or cuda:N")
    system = InstalledCuda()
    try:
        chosen = choose_device(device, system)
    except ConfigError as error:
        raise ConfigError(f"{str(error).removesuffix(OR_CPU)}; the CPU's kernels need no tuning") from error
    check_triton(system, needed_by="tune-kernels")
    loading.pull_if_needed(model)
    from forerun.ops.cuda.kernels.meter import CudaMeter

    path, index = store.resolve_model(model), chosen.index or 0
    with as_current(chosen):
        tuned = tune_model(path, CudaMeter(chosen), system, index=index, output=output, rounds=rounds)
    print(json.dumps(tuned) if json_output else f"wrote {tuned['file']}, digest {tuned['digest']}")


def tune_model(
    path: Path, meter: Meter, system: CudaSystem, *, index: int, output: Path | None, rounds: int
) -> dict[str, Any]:
    """Tune the kernels for the model in a folder or file, and write the table.

    Raises:
        ConfigError: the kernels do not compute the model, or the file cannot be written.
    """
    from forerun.bench.kernel_tuning import tune, weight_shapes
    from forerun.config.kernel_table import table_file
    from forerun.models.config_file import read_config
    from forerun.models.families import decoder_config, supports
    from forerun.ops.cuda.tiles import TileTable

    config = read_config(path)
    if not supports(config) or decoder_config(config).experts is not None:
        raise ConfigError(f"{path}: this architecture runs through transformers' own code, without the kernels")
    gpu, triton = system.gpu(index), str(system.triton)
    file = output or table_file(cache_folder(), gpu, triton)
    shapes = weight_shapes(decoder_config(config))
    tiles = _earlier(file, gpu, triton)
    for shape in shapes:
        tiles.pop(shape, None)
    tiles |= tune(shapes, meter, shared_bytes=gpu.shared_bytes, rounds=rounds, report=_show)
    table = TileTable(gpu=gpu.name, capability=gpu.capability, triton=triton, tiles=tiles)
    table.write(file)
    return {"file": str(file), "digest": table.digest, "gpu": gpu.name, "triton": triton, "num_shapes": len(tiles)}


def _earlier(file: Path, gpu: GPU, triton: str) -> dict[Shape, Tiles]:
    """What the file holds already.

    Raises:
        ConfigError: it holds something else, which is not overwritten.
    """
    from forerun.ops.cuda.tiles import TileTable

    if not file.exists():
        return {}
    table = TileTable.read(file)
    table.check_fits(gpu, triton, source=str(file))
    return dict(table.tiles)


def _show(found: TunedShape) -> None:
    outputs, inputs = found.shape
    gain = f"{found.gain:.0%} faster than the rule's" if found.gain else "the rule's"
    refused = f"; {found.num_refused} faster ones change a row's bits" if found.num_refused else ""
    print(f"{outputs} x {inputs}: {found.tiles} ({gain}{refused})", file=sys.stderr)
