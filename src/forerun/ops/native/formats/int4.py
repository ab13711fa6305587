"""Weights rounded to four bits with a scale per 32 inputs and perhaps an offset, stored and multiplied as GGUF's blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.errors import ConfigError
from forerun.ops.block_rounding import round_to_q4_0, round_to_q8_0
from forerun.ops.block_weight import BlockWeight
from forerun.ops.block_writing import BLOCK
from forerun.ops.native.formats.base import PackedWeight, WeightFormat
from forerun.ops.native.formats.blocks import BLOCK_TILES
from forerun.ops.native.library import Kernels
from forerun.ops.native.memory import Arena
from forerun.ops.native.rounding import round_to_q4_1


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Format(WeightFormat):
    """Four bits for the matrices of layers, Q8_0 for a head, which makes up most of what is lost, and for embeddings.

    round_to_blocks: rounds a weight, given what its inputs count.
    """

    round_to_blocks: Callable[[Kernels, Tensor, Tensor | None], BlockWeight]
    activations: torch.dtype = torch.bfloat16
    is_quantization: bool = True
    weighs_inputs: bool = True
    rounds_embedding: bool = True

    def pack(
        self,
        kernels: Kernels,
        weight: Tensor,
        bias: Tensor | None,
        arena: Arena,
        importance: Tensor | None = None,
    ) -> PackedWeight:
        """See `WeightFormat`."""
        self._check_inputs(weight)
        blocks = self.round_to_blocks(kernels, weight, importance)
        return BLOCK_TILES[blocks.format].pack(kernels, blocks, bias, arena)

    @property
    def bytes_per_head_weight(self) -> float:
        """See `WeightFormat`."""
        return 34 / BLOCK

    def pack_head(self, kernels: Kernels, weight: Tensor, arena: Arena) -> PackedWeight:
        """See `WeightFormat`."""
        self._check_inputs(weight)
        return BLOCK_TILES["Q8_0"].pack(kernels, round_to_q8_0(weight), None, arena)

    def unpack(self, packed: PackedWeight) -> Tensor:
        """See `StoredFormat`."""
        return packed.format.unpack(packed)

    def select(self, kernels: Kernels, packed: PackedWeight, outputs: Tensor) -> PackedWeight:
        """See `StoredFormat`."""
        return packed.format.select(kernels, packed, outputs)

    def _check_inputs(self, weight: Tensor) -> None:
        if weight.shape[1] % BLOCK:
            raise ConfigError(
                f"quantization: got {self.name!r}, which takes {BLOCK} inputs together, but the model has a weight of "
                f"{weight.shape[1]} inputs; use int8"
            )


def _round_to_q4_0(kernels: Kernels, weight: Tensor, importance: Tensor | None) -> BlockWeight:  # noqa: ARG001
    return round_to_q4_0(weight, importance)


INT4 = Int4Format(
    name="int4",
    kernel_id=BLOCK_TILES["Q4_1"].kernel_id,
    bytes_per_weight=20 / BLOCK,
    round_to_blocks=round_to_q4_1,
)

INT4_SYMMETRIC = Int4Format(
    name="int4-symmetric",
    kernel_id=BLOCK_TILES["Q4_0"].kernel_id,
    bytes_per_weight=18 / BLOCK,
    round_to_blocks=_round_to_q4_0,
)
