"""bf16 weights in 12 bits, nothing lost: coding by the kernels (csrc/coded.h), decoding in torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.ops.native.library import Kernels
from forerun.ops.native.memory import Arena
from forerun.ops.native.structs import TILE

TABLE_BYTES = 64  # sixteen high bytes, four times
STEP_WEIGHTS = 2 * TILE  # of two inputs
NAME_BYTES = STEP_WEIGHTS // 2
STEP_BYTES = NAME_BYTES + STEP_WEIGHTS
MOST_RARE = 1e-3  # of a weight's values; each costs some ten nanoseconds in each pass


@dataclass(frozen=True, slots=True)
class RareWeights:
    """Weights whose high bytes are rare in their tile, tile after tile.

    `values` [n] int64 is `RareWeight` of csrc/coded.h: step (32 bits), place in it (16), the bf16. `first` [tiles + 1]
    int64 says where each tile's begin.
    """

    values: Tensor
    first: Tensor


def inputs_of(data: Tensor) -> int:
    """Inputs, padding included, of coded tiles [tiles, bytes]."""
    return (data.shape[1] - TABLE_BYTES) // STEP_BYTES * 2


def code(kernels: Kernels, rows: Tensor, arena: Arena) -> tuple[Tensor, RareWeights] | None:
    """The coded tiles [tiles, bytes] of a weight [outputs, inputs], contiguous bf16; None: too many of it are rare."""
    outputs, inputs = rows.shape
    num_tiles = -(-outputs // TILE)
    tables = torch.empty(num_tiles, TABLE_BYTES, dtype=torch.uint8)
    first = torch.empty(num_tiles + 1, dtype=torch.int64)
    kernels.choose_high_bytes(rows.data_ptr(), outputs, inputs, tables.data_ptr(), first.data_ptr())
    num_rare = int(first[-1])
    if num_rare > MOST_RARE * rows.numel():
        return None
    rare = RareWeights(arena.empty((num_rare,), torch.int64), first)
    data = arena.empty((num_tiles, TABLE_BYTES + -(-inputs // 2) * STEP_BYTES), torch.uint8)
    kernels.code_weight(
        *(rows.data_ptr(), outputs, inputs, tables.data_ptr()),
        *(first.data_ptr(), data.data_ptr(), rare.values.data_ptr()),
    )
    return data, rare


def decode(data: Tensor, rare: RareWeights) -> Tensor:
    """Coded tiles [tiles, bytes] as plain ones: [tiles, inputs / 2, 32, 2] bf16. The twin of `CodedTile` in csrc/coded.h."""
    num_tiles = len(data)
    tables, steps = data[:, :TABLE_BYTES], data[:, TABLE_BYTES:].reshape(num_tiles, -1, STEP_BYTES)
    names = torch.cat([steps[..., :NAME_BYTES] & 15, steps[..., :NAME_BYTES] >> 4], dim=-1)
    high = tables.gather(1, names.flatten(1).long()).view(names.shape)
    bytes_ = torch.stack([steps[..., NAME_BYTES:], high], dim=-1)  # [tiles, steps, 64, 2]
    # Eight weights of one half, eight of the other, and so on.
    halves = bytes_.view(*names.shape[:2], -1, 2, 8, 2).transpose(2, 3)
    weights = halves.reshape(*names.shape, 2).view(torch.int16)[..., 0]
    tiles = torch.arange(num_tiles).repeat_interleave(rare.first.diff())
    values = rare.values
    weights[tiles, values & 0xFFFFFFFF, (values >> 32) & 0xFFFF] = (values >> 48).to(torch.int16)
    return weights.view(torch.bfloat16).view(num_tiles, -1, TILE, 2)
