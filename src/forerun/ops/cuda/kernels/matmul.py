"""Matrix products of a step's rows with a layer's weights, which are read once; `ops.cuda.matmul` is the twin.

An output is the sum over `splits` parts of the inputs, each summed in steps of one width, joined in order. Both numbers come
from the weight's shape alone (`ops.cuda.tiles`), never from the number of rows or from timing, so a row's bits do not
depend on the rows beside it; and no code is compiled for some number of rows (`do_not_specialize`). Up to sixteen rows are computed as
sixteen, more in tiles of 32: these two shapes run on the same instruction of the tensor cores (mma.sync m16n8k16). On Hopper, more
rows than 32 are computed in tiles of 64 or 128, which run on its wgmma: that sums alike, as `benchmarks.gpu_first_hour` has seen.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.ops.cuda.tiles import Tiles, tiles_of

FEW_ROWS, MANY_ROWS = 16, 32
"""Rows of a tile."""

WIDE_ROWS, WIDEST_ROWS = 64, 128
"""Of a tile on Hopper, where there are more rows than MANY_ROWS: on its wgmma, which sums as mma.sync does."""

WARPS = {FEW_ROWS: 4, MANY_ROWS: 4, WIDE_ROWS: 4, WIDEST_ROWS: 8}
MULTIPROCESSORS = 128  # about those of a GPU: with fewer programs the widest tiles leave some without work

_FINISH_BLOCK = 1024
ROWS_PER_LAUNCH = 256  # bounds the memory of the parts' sums
STAGES = {2: 4, 4: 2}
"""By bytes of an input: steps that are loaded ahead; in 99 KiB, as some GPUs have them, no more fit of fp32."""

WIDEST_STAGES = 3  # of tiles of `WIDEST_ROWS`
WIDE_BYTES = 227 << 10  # of shared memory that a program may have where tiles are wide

_PLAIN = tl.constexpr(0)
_ADDS = tl.constexpr(1)
_SILU = tl.constexpr(2)
_GELU = tl.constexpr(3)
_GELU_TANH = tl.constexpr(4)
_CAPPED = tl.constexpr(5)
_ENDINGS = {"silu": 2, "gelu": 3, "gelu_pytorch_tanh": 4}


@triton.jit(do_not_specialize=["T"])
def _multiply(
    x, weight, parts, T, N, K, PART: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_OUTPUTS: tl.constexpr, STEP: tl.constexpr,
    EVICTION: tl.constexpr,
):  # fmt: skip
    # Programs that read the same weights follow each other, so that all but the first find them in the cache.
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    output = tl.program_id(1) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    first = tl.program_id(2) * PART
    step = tl.arange(0, STEP)
    x_at = x + row[:, None].to(tl.int64) * K + step[None, :]
    weight_at = weight + output[None, :].to(tl.int64) * K + step[:, None]
    total = tl.zeros((TILE_ROWS, TILE_OUTPUTS), tl.float32)
    for begin in range(first, first + PART, STEP):
        left = K - begin
        a = tl.load(x_at + begin, (row[:, None] < T) & (step[None, :] < left), 0.0)
        b = tl.load(
            weight_at + begin,
            (output[None, :] < N) & (step[:, None] < left),
            0.0,
            eviction_policy=EVICTION,
        )
        total = tl.dot(a, b, total, input_precision="ieee")
    at = (tl.program_id(2).to(tl.int64) * T + row[:, None]) * N + output[None, :]
    tl.store(parts + at, total.to(parts.dtype.element_ty), (row[:, None] < T) & (output[None, :] < N))


@triton.jit
def _joined(parts, row, at, in_range, T, N, SPLITS: tl.constexpr):
    total = tl.load(parts + row * N + at, in_range, 0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts + (split * T + row) * N + at, in_range, 0.0)
    return total


@triton.jit(do_not_specialize=["T"])
def _finish(
    parts, bias, output, scale, T, N, OUT: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr,
    ENDING: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_range = at < OUT
    result = _joined(parts, row, at, in_range, T, N, SPLITS)
    if HAS_BIAS:
        result += tl.load(bias + at, in_range, 0.0).to(tl.float32)
    if ENDING == _ADDS:
        result = tl.load(output + row * OUT + at, in_range, 0.0) + result * scale
    if ENDING == _CAPPED:
        result = result * scale
        if CAP > 0:
            doubled = tl.minimum(result * (2.0 / CAP), 80.0)  # where exp is finite; tanh is 1 long before
            result = CAP * (1.0 - 2.0 / (tl.exp(doubled) + 1.0))
    if ENDING == _SILU:
        result = result / (1.0 + tl.exp(-result))
    if ENDING == _GELU:
        result = 0.5 * result * (1.0 + tl.erf(result * 0.7071067811865476))
    if ENDING == _GELU_TANH:
        inner = 1.5957691216057308 * (result + 0.044715 * result * result * result)  # twice tanh's argument
        result = result / (1.0 + tl.exp(-inner))
    if (ENDING >= _SILU) & (ENDING <= _GELU_TANH):
        up = _joined(parts, row, at + OUT, in_range, T, N, SPLITS)
        if HAS_BIAS:
            up += tl.load(bias + at + OUT, in_range, 0.0).to(tl.float32)
        result = result * up
    tl.store(output + row * OUT + at, result.to(output.dtype.element_ty), in_range)


@functools.cache
def _has_wide_tiles(device: torch.device) -> bool:
    """Whether tiles of 64 rows have been seen to give the bits of 16 there (`benchmarks.gpu_first_hour`)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def tile_rows_of(num_rows: int, tiles: Tiles, *, num_tiles: int, has_wide_tiles: bool) -> int:
    """Return the rows of a tile; all of them give a row the same bits.

    Args:
        num_rows: that are multiplied.
        tiles: how the weight is cut.
        num_tiles: tiles of the weight's outputs.
        has_wide_tiles: whether the GPU and the inputs have them.
    """
    if num_rows <= FEW_ROWS:
        return FEW_ROWS
    if num_rows <= MANY_ROWS or not has_wide_tiles:
        return MANY_ROWS
    if num_rows > WIDE_ROWS and num_tiles * tiles.splits >= MULTIPROCESSORS and _fits(WIDEST_ROWS, tiles):
        return WIDEST_ROWS
    return WIDE_ROWS if _fits(WIDE_ROWS, tiles) else MANY_ROWS


def _fits(tile_rows: int, tiles: Tiles) -> bool:
    """Whether shared memory holds the steps that are loaded ahead, of two bytes each."""
    stages = WIDEST_STAGES if tile_rows == WIDEST_ROWS else STAGES[2]
    return 2 * stages * (tile_rows + tiles.outputs) * tiles.inputs <= WIDE_BYTES


def _parts(x: Tensor, weight: Tensor, tiles: Tiles, parts: Tensor) -> None:
    """Write the parts' sums: [splits, T, N]."""
    num_rows, num_inputs = x.shape
    num_tiles = triton.cdiv(len(weight), tiles.outputs)
    has_wide_tiles = x.element_size() == 2 and _has_wide_tiles(x.device)
    tile_rows = tile_rows_of(num_rows, tiles, num_tiles=num_tiles, has_wide_tiles=has_wide_tiles)
    _multiply[(triton.cdiv(num_rows, tile_rows), num_tiles, tiles.splits)](
        *(x, weight, parts, num_rows, len(weight), num_inputs),
        PART=triton.cdiv(triton.cdiv(num_inputs, tiles.inputs), tiles.splits) * tiles.inputs,
        TILE_ROWS=tile_rows,
        TILE_OUTPUTS=tiles.outputs,
        STEP=tiles.inputs,
        EVICTION="evict_first" if num_rows <= tile_rows else "",  # other tiles of rows read the same weights
        num_warps=WARPS[tile_rows],
        num_stages=WIDEST_STAGES if tile_rows == WIDEST_ROWS else STAGES[x.element_size()],
    )


def _compute(
    x: Tensor,
    weight: Tensor,
    output: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    ending: int = 0,
    cap: float = 0.0,
) -> None:
    tiles = tiles_of(*weight.shape)
    num_outputs = output.shape[1]
    is_plain = tiles.splits == 1 and ending == 0 and bias is None
    for x_rows, rows in zip(x.split(ROWS_PER_LAUNCH), output.split(ROWS_PER_LAUNCH), strict=True):
        if is_plain:
            _parts(x_rows, weight, tiles, rows)
            continue
        num_rows = len(rows)
        parts = torch.empty((tiles.splits, num_rows, len(weight)), dtype=torch.float32, device=x.device)
        _parts(x_rows, weight, tiles, parts)
        _finish[(num_rows, triton.cdiv(num_outputs, _FINISH_BLOCK))](
            *(parts, parts if bias is None else bias, rows, scale, num_rows, len(weight)),
            OUT=num_outputs,
            SPLITS=tiles.splits,
            HAS_BIAS=bias is not None,
            ENDING=ending,
            CAP=cap,
            BLOCK=_FINISH_BLOCK,
        )


def linear(x: Tensor, weight: Tensor, output: Tensor, *, bias: Tensor | None = None) -> None:
    """Write x @ weight.T + bias: x [T, K], weight [N, K], bias [N] or None -> output [T, N]; all contiguous."""
    _compute(x, weight, output, bias=bias)


def capped_linear(x: Tensor, weight: Tensor, output: Tensor, *, factor: float = 1.0, cap: float = 0.0) -> None:
    """Write cap * tanh(factor * (x @ weight.T) / cap), or without the cap where it is 0: -> output [T, N] fp32."""
    is_plain = factor == 1.0 and cap == 0.0
    _compute(x, weight, output, scale=factor, ending=0 if is_plain else _CAPPED.value, cap=cap)


def add_linear(x: Tensor, weight: Tensor, residual: Tensor, *, bias: Tensor | None = None, scale: float = 1.0) -> None:
    """Add (x @ weight.T + bias) * scale to `residual` [T, N] fp32 in place; all contiguous."""
    _compute(x, weight, residual, bias=bias, scale=scale, ending=_ADDS.value)


def gated_linear(x: Tensor, gate_up: Tensor, output: Tensor, *, activation: str, bias: Tensor | None = None) -> None:
    """Write activation(gate) * up: x [T, K], gate_up [2 * N, K], bias [2 * N] or None, gates first -> output [T, N].

    All are contiguous; `activation` is a name of `ops.layers.ACTIVATIONS`.
    """
    _compute(x, gate_up, output, bias=bias, ending=_ENDINGS[activation])
