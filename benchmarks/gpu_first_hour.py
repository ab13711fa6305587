"""What has to be known of a GPU before its kernels are tuned: how products sum, how fast they read, what a launch costs.

Run: python -m benchmarks.gpu_first_hour [--json FILE] [--seconds 420] [--only QUESTION ...]
Needs one NVIDIA GPU, torch with CUDA and triton; no network and no model. Five questions, each answered by itself, so that a
failure of one leaves the others:

- bits: does a row have the same bits in tiles of 16, 32, 64 and 128 rows, and on which instructions?
- products: bytes of weights per second of the kernels and of cuBLAS at 1, 8, 16 and 64 rows, on the shapes of Llama-3.1-8B,
  and of other tiles than the table's while time is left. Weights rotate, so that none is read from the cache.
- launches: microseconds of a small kernel in a CUDA graph, with and without programmatic dependent launch.
- heights: microseconds of products of 32 to 256 rows in tiles of 32, 64 and 128, and whether each row has the bits of 16-row tiles.
- stack: milliseconds of all products of the 8B shape in one CUDA graph, by the kernels and by cuBLAS.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.ops.cuda.kernels import matmul
from forerun.ops.cuda.tiles import Tiles, tiles_of

SHAPES = {"qkv": (6144, 4096), "output": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
HEAD = (128256, 4096)
ROWS = (1, 8, 16, 64)
NUM_LAYERS = 32
LEAST_BYTES = 400e6  # of the weights that one measurement reads: several times the cache
OTHER_SHAPES = {
    "head": HEAD,
    "small head": (49152, 576),
    "small qkv": (960, 576),
    "small down": (576, 1536),
    "odd": (1000, 72),
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    """bf16 numbers with a standard deviation of 1/50, as weights have."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) / 50


def microseconds(work: Callable[[], object], *, repeats: int = 20) -> float:
    """Median time of `work` in a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # what compiles or allocates does so before the capture
        work()
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * begin.elapsed_time(end))
    return float(statistics.median(times))


def bits(_deadline: float) -> dict[str, Any]:
    """Whether tiles of other heights give the bits of 16-row tiles, for each shape."""
    found: dict[str, Any] = {}
    for name, (num_outputs, num_inputs) in SHAPES.items():
        x, weight = normal(128, num_inputs), normal(num_outputs, num_inputs, seed=1)
        tiles = tiles_of(num_outputs, num_inputs)
        results = {}
        for tile_rows in (16, 32, 64, 128):
            parts = torch.empty((tiles.splits, 128, num_outputs), device="cuda")
            compiled = multiply(x, weight, parts, tiles, tile_rows)
            ptx = compiled.asm["ptx"]
            results[tile_rows] = parts
            found[f"{name} in tiles of {tile_rows}"] = {
                "instruction": "wgmma" if "wgmma.mma" in ptx else "mma.sync" if "mma.sync" in ptx else "neither",
                "same bits as tiles of 16": torch.equal(parts, results[16]),
                "largest difference": float((parts - results[16]).abs().max()),
            }
        alone = torch.empty((tiles.splits, 1, num_outputs), device="cuda")
        multiply(x[:1], weight, alone, tiles, 16)
        found[f"{name}, one row alone"] = torch.equal(alone[:, 0], results[16][:, 0])
    return found


def heights(_deadline: float) -> dict[str, Any]:
    """Microseconds by rows and height of a tile, where each row is up to a million times as large as another, and equality of bits."""
    found: dict[str, Any] = {}
    for name, (num_outputs, num_inputs) in {**SHAPES, **OTHER_SHAPES}.items():
        tiles = tiles_of(num_outputs, num_inputs)
        sizes = torch.logspace(-3, 3, 256, device="cuda").to(torch.bfloat16)
        x = normal(256, num_inputs) * sizes[:, None]
        weights = [normal(num_outputs, num_inputs, seed=1 + i) for i in range(copies_of(num_outputs, num_inputs))]
        by_sixteen = torch.empty((tiles.splits, 256, num_outputs), device="cuda")
        for rows in range(0, 256, 16):
            parts = torch.empty((tiles.splits, 16, num_outputs), device="cuda")
            multiply(x[rows : rows + 16], weights[0], parts, tiles, 16)
            by_sixteen[:, rows : rows + 16] = parts
        for num_rows, tile_rows, warps in itertools.product((32, 64, 128, 256), (32, 64, 128), (4, 8)):
            if tile_rows > num_rows:
                continue
            parts = torch.empty((tiles.splits, num_rows, num_outputs), device="cuda")
            stages = 3 if tile_rows == 128 else 4
            product = functools.partial(
                multiply,
                x[:num_rows],
                parts=parts,
                tiles=tiles,
                tile_rows=tile_rows,
                warps=warps,
                stages=stages,
            )
            product(weights[0])
            label = f"{name}, {num_rows} rows in tiles of {tile_rows}, {warps} warps"
            found[label] = {"same bits": torch.equal(parts, by_sixteen[:, :num_rows])}
            found[label]["microseconds"] = round(each_in_turn(weights, product) / len(weights), 2)
    return found


def multiply(
    x: Tensor, weight: Tensor, parts: Tensor, tiles: Tiles, tile_rows: int, *, warps: int = 4, stages: int = 3
) -> Any:
    """The kernel under `forerun.ops.cuda.kernels.matmul`, with any tiles; returns what was compiled."""
    num_rows, num_inputs = x.shape
    grid = (triton.cdiv(num_rows, tile_rows), triton.cdiv(len(weight), tiles.outputs), tiles.splits)
    return matmul._multiply[grid](
        *(x, weight, parts, num_rows, len(weight), num_inputs),
        PART=triton.cdiv(triton.cdiv(num_inputs, tiles.inputs), tiles.splits) * tiles.inputs,
        TILE_ROWS=tile_rows,
        TILE_OUTPUTS=tiles.outputs,
        STEP=tiles.inputs,
        EVICTION="evict_first" if num_rows <= tile_rows else "",
        num_warps=warps,
        num_stages=stages,
    )


def by_kernel(x: Tensor, output: Tensor, weight: Tensor) -> None:
    matmul.linear(x, weight, output)


def by_cublas(x: Tensor, output: Tensor, weight: Tensor) -> None:
    torch.mm(x, weight.T, out=output)


def products(deadline: float) -> dict[str, Any]:
    """Terabytes of weights per second: the kernels, cuBLAS, then other tiles."""
    found: dict[str, Any] = {}
    weights = {}
    for name, shape in {**SHAPES, "head": HEAD}.items():
        weights[name] = [normal(*shape, seed=i) for i in range(copies_of(*shape))]
        for num_rows in ROWS:
            x, output = normal(num_rows, shape[1]), torch.empty(num_rows, shape[0], device="cuda", dtype=torch.bfloat16)
            found[f"{name}, {num_rows} rows"] = {
                "kernel TB/s": speed(weights[name], functools.partial(by_kernel, x, output)),
                "cuBLAS TB/s": speed(weights[name], functools.partial(by_cublas, x, output)),
            }
    for name, (outputs, inputs, splits, warps, stages) in itertools.product(SHAPES, cuts()):
        if time.monotonic() > deadline:
            break
        shape = SHAPES[name]
        tiles = Tiles(outputs, inputs, splits)
        for num_rows, tile_rows in ((1, 16), (32, 32)):
            x, parts = normal(num_rows, shape[1]), torch.empty((splits, num_rows, shape[0]), device="cuda")
            label = f"{name}, {num_rows} rows, {tiles}, {warps} warps, {stages} stages"
            try:
                cut = functools.partial(
                    multiply, x, parts=parts, tiles=tiles, tile_rows=tile_rows, warps=warps, stages=stages
                )
                found[label] = speed(weights[name], cut)
            except triton.runtime.errors.OutOfResources as error:
                found[label] = str(error)
    return found


def cuts() -> list[tuple[int, int, int, int, int]]:
    """Outputs of a program, inputs of a step, parts of the inputs, warps and stages that shared memory may hold."""
    return [
        cut
        for cut in itertools.product((32, 64, 128), (64, 128, 256), (1, 2, 4, 8), (4, 8), (4, 6))
        if 2 * cut[4] * (16 + cut[0]) * cut[1] <= 227 << 10 and (cut[0] == 128 or cut[3] == 4) and cut[:2] != (128, 256)
    ]


def copies_of(num_outputs: int, num_inputs: int) -> int:
    """How many weights of a shape are read in turn, at most 64."""
    return min(64, max(2, round(LEAST_BYTES / (2 * num_outputs * num_inputs))))


def each_in_turn(weights: list[Tensor], product: Callable[[Tensor], object]) -> float:
    """Microseconds of a product with one weight after the other."""

    def each() -> None:
        for weight in weights:
            product(weight)

    return microseconds(each)


def speed(weights: list[Tensor], product: Callable[[Tensor], object]) -> float:
    """Terabytes per second of a product that reads one weight after the other."""
    return sum(weight.nbytes for weight in weights) / each_in_turn(weights, product) / 1e6


@triton.jit
def _add_one(x, WAITS: tl.constexpr):  # noqa: N803
    if WAITS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = tl.program_id(0) * 256 + tl.arange(0, 256)
    tl.store(x + at, tl.load(x + at) + 1.0)


def launches(_deadline: float) -> dict[str, Any]:
    """Microseconds of each of 200 small kernels in a CUDA graph, and whether dependent launches keep their order."""
    found: dict[str, Any] = {}
    for waits in (False, True):
        x = torch.zeros(132 * 256, device="cuda")

        def chain(x: Tensor = x, waits: bool = waits) -> None:
            for _ in range(200):
                _add_one[(132,)](x, WAITS=waits, launch_pdl=waits)

        name = "with dependent launch" if waits else "without"
        found[name] = microseconds(chain) / 200
        found[f"{name}, in order"] = bool((x == x[0]).all())
    return found


def stack(_deadline: float) -> dict[str, Any]:
    """Milliseconds of the products of a whole 8B step."""
    layers = [[normal(*shape, seed=layer) for shape in SHAPES.values()] for layer in range(NUM_LAYERS)]
    head = normal(*HEAD)
    num_bytes = sum(weight.nbytes for layer in layers for weight in layer) + head.nbytes
    found: dict[str, Any] = {"gigabytes": num_bytes / 1e9}

    def run(num_rows: int, product: Callable[[Tensor, Tensor, Tensor], None]) -> float:
        wide = {size: normal(num_rows, size) for size in (4096, 14336)}
        outputs = {
            size: torch.empty(num_rows, size, device="cuda", dtype=torch.bfloat16)
            for size in {shape[0] for shape in SHAPES.values()} | {HEAD[0]}
        }

        def step() -> None:
            for weight in (*itertools.chain(*layers), head):
                product(wide[weight.shape[1]], outputs[weight.shape[0]], weight)

        return microseconds(step, repeats=10) / 1000

    for num_rows in ROWS:
        found[f"{num_rows} rows"] = {
            "kernels ms": run(num_rows, by_kernel),
            "cuBLAS ms": run(num_rows, by_cublas),
        }
    return found


QUESTIONS: dict[str, Callable[[float], dict[str, Any]]] = {
    question.__name__: question for question in (bits, launches, heights, stack, products)
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here, after each question")
    parser.add_argument("--seconds", type=float, default=420, help="other tiles are tried until then")
    parser.add_argument("--only", nargs="+", choices=QUESTIONS, default=list(QUESTIONS))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_first_hour: found no CUDA device; run it on a machine with an NVIDIA GPU", file=sys.stderr)
        return 2
    started = time.monotonic()
    properties = torch.cuda.get_device_properties(0)
    results: dict[str, Any] = {
        "machine": f"{properties.name}, compute capability {properties.major}.{properties.minor}",
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "CUDA": torch.version.cuda},
    }
    for question in (QUESTIONS[name] for name in arguments.only):
        begun = time.monotonic()
        try:
            results[question.__name__] = question(started + arguments.seconds)
        except Exception:  # one answer less; the machine is lent for minutes only
            results[question.__name__] = {"failed": traceback.format_exc()}
        torch.cuda.empty_cache()
        results[question.__name__]["seconds"] = round(time.monotonic() - begun, 1)
        print(json.dumps({question.__name__: results[question.__name__]}, indent=1), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
