"""bf16 weights in 12 bits, nothing lost: coding by the kernels (csrc/coded.h), decoding in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.ops.native.formats.base import PackedWeight, WeightFormat, padded_outputs, read_outputs
from forerun.ops.native.formats.plain import BF16, untiled
from forerun.ops.native.library import LEVELS, Kernels
from forerun.ops.native.memory import Arena
from forerun.ops.native.structs import TILE

TABLE_BYTES = 64  # sixteen high bytes, four times
STEP_WEIGHTS = 2 * TILE  # of two inputs
NAME_BYTES = STEP_WEIGHTS // 2
STEP_BYTES = NAME_BYTES + STEP_WEIGHTS
MOST_RARE = 1e-3  # of a weight's values; each costs some ten nanoseconds in each pass


class CodedFormat(WeightFormat):
    """Tiles [tiles, bytes] of low bytes and four bits for each high byte, and beside them the weights without such a code.

    `rare` [n] int64 is `RareWeight` of csrc/coded.h, tile after tile: step (32 bits), place in it (16), the bf16.
    `first_rare` [tiles + 1] int64 says where each tile's begin. A weight with too many of them is stored as plain bf16.
    """

    def pack(
        self,
        kernels: Kernels,
        weight: Tensor,
        bias: Tensor | None,
        arena: Arena,
        importance: Tensor | None = None,  # noqa: ARG002
    ) -> PackedWeight:
        """See `WeightFormat`."""
        rows = weight.to(torch.bfloat16).contiguous()
        outputs, inputs = rows.shape
        num_tiles = -(-outputs // TILE)
        tables = torch.empty(num_tiles, TABLE_BYTES, dtype=torch.uint8)
        first = torch.empty(num_tiles + 1, dtype=torch.int64)
        kernels.choose_high_bytes(rows.data_ptr(), outputs, inputs, tables.data_ptr(), first.data_ptr())
        num_rare = int(first[-1])
        if num_rare > MOST_RARE * rows.numel():
            return BF16.pack(kernels, weight, bias, arena)
        rare = arena.empty((num_rare,), torch.int64)
        data = arena.empty((num_tiles, TABLE_BYTES + -(-inputs // 2) * STEP_BYTES), torch.uint8)
        kernels.code_weight(
            *(rows.data_ptr(), outputs, inputs, tables.data_ptr()),
            *(first.data_ptr(), data.data_ptr(), rare.data_ptr()),
        )
        return PackedWeight(
            format=self,
            data=data,
            outputs=outputs,
            inputs=inputs,
            bias=None if bias is None else padded_outputs(bias, arena),
            rare=rare,
            first_rare=first,
        )

    def unpack(self, packed: PackedWeight) -> Tensor:
        """See `WeightFormat`."""
        assert packed.rare is not None
        assert packed.first_rare is not None
        return untiled(_decode(packed.data, packed.rare, packed.first_rare))[: packed.outputs, : packed.inputs]

    def select(self, kernels: Kernels, packed: PackedWeight, outputs: Tensor) -> PackedWeight:
        """Code them anew: a tile's outputs share their code."""
        bias = None if packed.bias is None else packed.bias[outputs]
        return self.pack(kernels, read_outputs(kernels, packed, outputs), bias, Arena())


def _decode(data: Tensor, rare: Tensor, first_rare: Tensor) -> Tensor:
    """Coded tiles [tiles, bytes] as plain ones: [tiles, inputs / 2, 32, 2] bf16. The twin of `CodedTile` in csrc/coded.h."""
    num_tiles = len(data)
    tables, steps = data[:, :TABLE_BYTES], data[:, TABLE_BYTES:].reshape(num_tiles, -1, STEP_BYTES)
    names = torch.cat([steps[..., :NAME_BYTES] & 15, steps[..., :NAME_BYTES] >> 4], dim=-1)
    high = tables.gather(1, names.flatten(1).long()).view(names.shape)
    bytes_ = torch.stack([steps[..., NAME_BYTES:], high], dim=-1)  # [tiles, steps, 64, 2]
    # Eight weights of one half, eight of the other, and so on.
    halves = bytes_.view(*names.shape[:2], -1, 2, 8, 2).transpose(2, 3)
    weights = halves.reshape(*names.shape, 2).view(torch.int16)[..., 0]
    tiles = torch.arange(num_tiles).repeat_interleave(first_rare.diff())
    weights[tiles, rare & 0xFFFFFFFF, (rare >> 32) & 0xFFFF] = (rare >> 48).to(torch.int16)
    return weights.view(torch.bfloat16).view(num_tiles, -1, TILE, 2)


BF16_CODED = CodedFormat(
    name="bf16-12bit",
    kernel_id=3,
    bytes_per_weight=1.5,
    activations=torch.bfloat16,
    levels=tuple(level for level in LEVELS if level != "portable"),  # which looks sixteen bytes up one by one
)
