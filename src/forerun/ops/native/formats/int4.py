"""Weights rounded to four bits with a scale and an offset per 32 inputs, stored and multiplied as GGUF's Q4_1."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.errors import ConfigError
from forerun.ops.block_rounding import round_to_q8_0
from forerun.ops.block_writing import BLOCK
from forerun.ops.native.formats.base import PackedWeight, WeightFormat
from forerun.ops.native.formats.blocks import BLOCK_TILES
from forerun.ops.native.library import Kernels
from forerun.ops.native.memory import Arena
from forerun.ops.native.rounding import round_to_q4_1


class Int4Format(WeightFormat):
    """Q4_1 for the matrices of layers, Q8_0 for a head, which makes up most of what is lost, and for embeddings."""

    def pack(
        self,
        kernels: Kernels,
        weight: Tensor,
        bias: Tensor | None,
        arena: Arena,
        importance: Tensor | None = None,
    ) -> PackedWeight:
        """See `WeightFormat`."""
        _check_inputs(weight)
        return BLOCK_TILES["Q4_1"].pack(kernels, round_to_q4_1(kernels, weight, importance), bias, arena)

    @property
    def bytes_per_head_weight(self) -> float:
        """See `WeightFormat`."""
        return 34 / BLOCK

    def pack_head(self, kernels: Kernels, weight: Tensor, arena: Arena) -> PackedWeight:
        """See `WeightFormat`."""
        _check_inputs(weight)
        return BLOCK_TILES["Q8_0"].pack(kernels, round_to_q8_0(weight), None, arena)

    def unpack(self, packed: PackedWeight) -> Tensor:
        """See `StoredFormat`."""
        return packed.format.unpack(packed)

    def select(self, kernels: Kernels, packed: PackedWeight, outputs: Tensor) -> PackedWeight:
        """See `StoredFormat`."""
        return packed.format.select(kernels, packed, outputs)


def _check_inputs(weight: Tensor) -> None:
    if weight.shape[1] % BLOCK:
        raise ConfigError(
            f"quantization: got 'int4', which takes {BLOCK} inputs together, but the model has a weight of "
            f"{weight.shape[1]} inputs; use int8"
        )


INT4 = Int4Format(
    name="int4",
    kernel_id=BLOCK_TILES["Q4_1"].kernel_id,
    bytes_per_weight=20 / BLOCK,
    activations=torch.bfloat16,
    is_quantization=True,
    weighs_inputs=True,
    rounds_embedding=True,
)
