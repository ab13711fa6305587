"""fp32, bf16 and fp16 weights as they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.ops.native.formats.base import PackedWeight, WeightFormat, padded_outputs
from forerun.ops.native.library import Kernels
from forerun.ops.native.memory import Arena
from forerun.ops.native.structs import TILE


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainFormat(WeightFormat):
    """Weights in `stored`, which holds them exactly: fp32 and fp16 as [tiles, inputs, 32], bf16 as [tiles, inputs / 2, 32, 2].

    Rows in `activations` are widened where the weights are fp32 or fp16, and sums are those of fp32 weights.
    """

    stored: torch.dtype

    def pack(
        self,
        kernels: Kernels,  # noqa: ARG002
        weight: Tensor,
        bias: Tensor | None,
        arena: Arena,
        importance: Tensor | None = None,  # noqa: ARG002
    ) -> PackedWeight:
        """See `WeightFormat`."""
        outputs, inputs = weight.shape
        return PackedWeight(
            format=self,
            data=tiled(weight, self.stored, arena),
            outputs=outputs,
            inputs=inputs,
            bias=None if bias is None else padded_outputs(bias, arena),
        )

    def unpack(self, packed: PackedWeight) -> Tensor:
        """See `WeightFormat`."""
        return untiled(packed.data)[: packed.outputs, : packed.inputs]

    def select(self, kernels: Kernels, packed: PackedWeight, outputs: Tensor) -> PackedWeight:  # noqa: ARG002
        """See `WeightFormat`."""
        return select_tiled(packed, outputs)


def tiled(weight: Tensor, dtype: torch.dtype, arena: Arena) -> Tensor:
    """[outputs, inputs] -> [tiles, inputs, 32] fp32 or fp16, or [tiles, inputs / 2, 32, 2] of others, padded with zeros."""
    outputs, inputs = weight.shape
    num_tiles, even = -(-outputs // TILE), inputs + inputs % 2
    pair = 1 if dtype in (torch.float32, torch.float16) else 2
    data = arena.empty((num_tiles, even // pair, TILE, pair), dtype)
    if (outputs, inputs) != (num_tiles * TILE, even):
        weight = torch.nn.functional.pad(weight, (0, even - inputs, 0, num_tiles * TILE - outputs))
    data.copy_(weight.view(num_tiles, TILE, even // pair, pair).permute(0, 2, 1, 3))
    return data.squeeze(-1) if pair == 1 else data


def untiled(data: Tensor) -> Tensor:
    """The padded weight [outputs, inputs] of which `tiled` made `data`."""
    data = data if data.ndim == 4 else data.unsqueeze(-1)
    tiles, steps, lanes, pair = data.shape
    return data.permute(0, 2, 1, 3).reshape(tiles * lanes, steps * pair)


def select_tiled(packed: PackedWeight, outputs: Tensor) -> PackedWeight:
    """Some outputs of a weight whose data are as of `tiled`."""
    padded = torch.zeros(-(-len(outputs) // TILE) * TILE, dtype=torch.int64)
    padded[: len(outputs)] = outputs
    tiles, lanes = padded // TILE, padded % TILE
    chosen = packed.data[tiles, :, lanes]  # [padded, steps(, 2)]
    return PackedWeight(
        format=packed.format,
        data=chosen.view(-1, TILE, *chosen.shape[1:]).transpose(1, 2).contiguous(),
        outputs=len(outputs),
        inputs=packed.inputs,
        scale=None if packed.scale is None else packed.scale[padded].contiguous(),
        bias=None if packed.bias is None else packed.bias[padded].contiguous(),
    )


FP32 = PlainFormat(name="fp32", kernel_id=0, bytes_per_weight=4, stored=torch.float32, activations=torch.float32)
BF16 = PlainFormat(name="bf16", kernel_id=1, bytes_per_weight=2, stored=torch.bfloat16, activations=torch.bfloat16)
FP16 = PlainFormat(name="fp16", kernel_id=5, bytes_per_weight=2, stored=torch.float16, activations=torch.float32)
EXACT_FP16 = PlainFormat(
    name="fp16-exact", kernel_id=6, bytes_per_weight=2, stored=torch.float16, activations=torch.bfloat16
)
EXACT_FP32 = PlainFormat(
    name="fp32-exact", kernel_id=7, bytes_per_weight=4, stored=torch.float32, activations=torch.bfloat16
)
