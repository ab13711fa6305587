"""Matrix products of a step's rows with a layer's weights, which are read once; `ops.cuda.matmul` is the twin.

An output is the sum over `splits` parts of the inputs, each summed in steps of one width, joined in order. Both numbers come
from the weight's shape alone (`ops.cuda.tiles`), never from the number of rows or from timing, so a row's bits do not
depend on the rows beside it; and no code is compiled for some number of rows (`do_not_specialize`). Up to sixteen rows are
computed as sixteen, more in tiles of 32: these two shapes run on the same instruction of the tensor cores (mma.sync m16n8k16). More
rows than 32 are computed in tiles of 64 or 128 where these were seen to give the same bits, as on Hopper, whose wgmma they run on.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.ops.cuda.system import InstalledCuda
from forerun.ops.cuda.tiles import Tiles, rule_of, tiles_of

FEW_ROWS, MANY_ROWS = 16, 32
"""Rows of a tile."""

WIDE_ROWS, WIDEST_ROWS = 64, 128
"""Of a tile where there are more rows than MANY_ROWS, on a GPU that was seen to sum alike in it (`wide_tiles`)."""

WARPS = {FEW_ROWS: 4, MANY_ROWS: 4, WIDE_ROWS: 4, WIDEST_ROWS: 8}
MULTIPROCESSORS = 132  # of an H200; constant, whatever GPU runs

STAGES, DEEP_STAGES = 4, 6
"""Steps that are loaded ahead, the second where there are so few programs that each must have more of them in flight."""

_FINISH_BLOCK = 1024
ROWS_PER_LAUNCH = 256  # bounds the memory of the parts' sums

_PLAIN = tl.constexpr(0)
_ADDS = tl.constexpr(1)
_SILU = tl.constexpr(2)
_GELU = tl.constexpr(3)
_GELU_TANH = tl.constexpr(4)
_CAPPED = tl.constexpr(5)
_ENDINGS = {"silu": _SILU.value, "gelu": _GELU.value, "gelu_pytorch_tanh": _GELU_TANH.value}


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
            # where exp is finite; tanh is 1 long before
            doubled = tl.minimum(result * (2.0 / CAP), 80.0, propagate_nan=tl.PropagateNan.ALL)
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


class WideTiles(NamedTuple):
    """What a GPU can do with many rows: the largest height of a tile that gives a row its bits, and bytes of shared memory."""

    rows: int
    shared_bytes: int


@functools.cache
def wide_tiles(device: torch.device, dtype: torch.dtype) -> WideTiles:
    """See which heights of tiles give rows the bits of 16-row tiles there; waits for the device, once for each dtype.

    On Hopper tiles of 64 rows or more run on another instruction (wgmma), and nothing but the hardware says how that sums.
    """
    if device.type != "cuda":
        return WideTiles(MANY_ROWS, 0)
    shared_bytes = InstalledCuda().gpu(device.index or 0).shared_bytes
    return WideTiles(_highest_alike(device, dtype, shared_bytes), shared_bytes)


def _highest_alike(device: torch.device, dtype: torch.dtype, shared_bytes: int) -> int:
    """The height up to which tiles sum rows alike, of those that fit: seen on rows of very different sizes."""
    source = torch.Generator(device).manual_seed(0)
    sizes = torch.logspace(-3, 3, WIDEST_ROWS, device=device, dtype=torch.float32)[:, None]
    rows, weight = (
        (torch.randn(WIDEST_ROWS, 1024, generator=source, device=device) * deviation).to(dtype)
        for deviation in (sizes, 0.02)
    )
    tiles = rule_of(*weight.shape)
    expected = torch.empty(tiles.splits, len(rows), len(weight), device=device)
    _multiply_in_tiles(rows, weight, expected, tiles, FEW_ROWS)
    highest = MANY_ROWS
    for tile_rows in (WIDE_ROWS, WIDEST_ROWS):
        if not _fits(tile_rows, tiles, shared_bytes):
            break
        found = torch.zeros_like(expected)
        _multiply_in_tiles(rows, weight, found, tiles, tile_rows)
        if not torch.equal(found, expected):
            break
        highest = tile_rows
    return highest


def tile_rows_of(num_rows: int, tiles: Tiles, *, num_tiles: int, wide: WideTiles) -> int:
    """Return the rows of a tile; all of them give a row the same bits.

    Args:
        num_rows: that are multiplied.
        tiles: how the weight is cut.
        num_tiles: tiles of the weight's outputs.
        wide: what the GPU can do with inputs of two bytes.
    """
    if num_rows <= FEW_ROWS:
        return FEW_ROWS
    if num_rows <= MANY_ROWS:
        return MANY_ROWS
    fills_all = num_tiles * tiles.splits >= MULTIPROCESSORS
    if num_rows > WIDE_ROWS and fills_all and wide.rows >= WIDEST_ROWS and _fits(WIDEST_ROWS, tiles, wide.shared_bytes):
        return WIDEST_ROWS
    return WIDE_ROWS if wide.rows >= WIDE_ROWS and _fits(WIDE_ROWS, tiles, wide.shared_bytes) else MANY_ROWS


def _fits(tile_rows: int, tiles: Tiles, shared_bytes: int) -> bool:
    """Whether shared memory holds the steps that are loaded ahead, of two bytes each."""
    return 2 * DEEP_STAGES * (tile_rows + tiles.outputs) * tiles.inputs <= shared_bytes


def _multiply_in_tiles(x: Tensor, weight: Tensor, parts: Tensor, tiles: Tiles, tile_rows: int) -> None:
    """Write the parts' sums [splits, T, N] by tiles of so many rows."""
    num_rows, num_inputs = x.shape
    num_tiles = triton.cdiv(len(weight), tiles.outputs)
    is_deep = tile_rows > MANY_ROWS or (num_tiles * tiles.splits <= 2 * MULTIPROCESSORS and tiles.inputs <= 64)
    _multiply[(triton.cdiv(num_rows, tile_rows), num_tiles, tiles.splits)](
        *(x, weight, parts, num_rows, len(weight), num_inputs),
        PART=triton.cdiv(triton.cdiv(num_inputs, tiles.inputs), tiles.splits) * tiles.inputs,
        TILE_ROWS=tile_rows,
        TILE_OUTPUTS=tiles.outputs,
        STEP=tiles.inputs,
        EVICTION="evict_first" if num_rows <= tile_rows else "",  # other tiles of rows read the same weights
        num_warps=WARPS[tile_rows],
        num_stages=DEEP_STAGES if is_deep and x.element_size() == 2 else STAGES,
    )


def _parts(x: Tensor, weight: Tensor, tiles: Tiles, parts: Tensor) -> None:
    """Write the parts' sums: [splits, T, N]."""
    if x.element_size() == 2:
        num_tiles = triton.cdiv(len(weight), tiles.outputs)
        tile_rows = tile_rows_of(len(x), tiles, num_tiles=num_tiles, wide=wide_tiles(x.device, x.dtype))
    else:
        tile_rows = FEW_ROWS  # threads multiply fp32, and in higher tiles hold more than registers have room for
    _multiply_in_tiles(x, weight, parts, tiles, tile_rows)


def _compute(
    x: Tensor,
    weight: Tensor,
    output: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    ending: int = _PLAIN.value,
    cap: float = 0.0,
) -> None:
    tiles = tiles_of(*weight.shape)
    num_outputs = output.shape[1]
    is_plain = tiles.splits == 1 and ending == _PLAIN.value and bias is None
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
    _compute(x, weight, output, scale=factor, ending=_PLAIN.value if is_plain else _CAPPED.value, cap=cap)


def add_linear(x: Tensor, weight: Tensor, residual: Tensor, *, bias: Tensor | None = None, scale: float = 1.0) -> None:
    """Add (x @ weight.T + bias) * scale to `residual` [T, N] fp32 in place; all contiguous."""
    _compute(x, weight, residual, bias=bias, scale=scale, ending=_ADDS.value)


def gated_linear(x: Tensor, gate_up: Tensor, output: Tensor, *, activation: str, bias: Tensor | None = None) -> None:
    """Write activation(gate) * up: x [T, K], gate_up [2 * N, K], bias [2 * N] or None, gates first -> output [T, N].

    All are contiguous; `activation` is a name of `ops.layers.ACTIVATIONS`.
    """
    _compute(x, gate_up, output, bias=bias, ending=_ENDINGS[activation])
