"""Weights in GGUF's block formats, as they are: the codes and scales of csrc/blocks.h, in tiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.ops.block_formats import BLOCK_FORMATS
from forerun.ops.block_weight import BlockWeight
from forerun.ops.native.formats.base import PackedWeight, padded_outputs, read_outputs
from forerun.ops.native.library import Kernels
from forerun.ops.native.memory import Arena
from forerun.ops.native.structs import TILE

FIRST_ID = 16
"""The number of the first row of `BLOCK_FORMATS` in `BlockStorage` of csrc/blocks.h, where they have the same order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTiles:
    """How the blocks of one format are stored for the kernels: [tiles, bytes of a tile] uint8, of 32 outputs each.

    Rows are rounded to bf16, and sums are fp32; a weight takes part with the value that its format defines.
    """

    name: str  # of the row of `BLOCK_FORMATS`
    kernel_id: int
    activations: torch.dtype = torch.bfloat16

    def pack(self, kernels: Kernels, weight: BlockWeight, bias: Tensor | None, arena: Arena) -> PackedWeight:
        """Store a weight and its bias [outputs], in memory of the arena."""
        outputs, inputs = weight.shape
        num_tiles = -(-outputs // TILE)
        data = arena.empty((num_tiles, kernels.block_tile_bytes(self.kernel_id, inputs)), torch.uint8)
        blocks = weight.data.contiguous()
        kernels.pack_blocks(self.kernel_id, blocks.data_ptr(), outputs, inputs, data.data_ptr())
        return PackedWeight(
            format=self,
            data=data,
            outputs=outputs,
            inputs=inputs,
            bias=None if bias is None else padded_outputs(bias, arena),
        )

    def unpack(self, kernels: Kernels, packed: PackedWeight) -> Tensor:
        """The weight [outputs, inputs] that was packed, read one by one as the tiles are defined."""
        return read_outputs(kernels, packed, torch.arange(packed.outputs))


BLOCK_TILES: dict[str, BlockTiles] = {
    name: BlockTiles(name=name, kernel_id=FIRST_ID + place) for place, name in enumerate(BLOCK_FORMATS)
}
"""How each row of `BLOCK_FORMATS` is stored."""
