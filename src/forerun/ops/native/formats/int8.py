"""Weights rounded to 8 bits with a scale per output, multiplied with bf16 activations."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.ops.block_rounding import ROUNDED_AT_ONCE
from forerun.ops.native.formats.base import PackedWeight, WeightFormat, padded_outputs
from forerun.ops.native.formats.plain import select_tiled, tiled, untiled
from forerun.ops.native.library import Kernels
from forerun.ops.native.memory import Arena


class Int8Format(WeightFormat):
    """[tiles, inputs / 2, 32, 2] int8 and an fp32 scale per output."""

    def pack(
        self,
        kernels: Kernels,  # noqa: ARG002
        weight: Tensor,
        bias: Tensor | None,
        arena: Arena,
        importance: Tensor | None = None,  # noqa: ARG002
    ) -> PackedWeight:
        """See `WeightFormat`."""
        values, scale = quantize(weight)
        outputs, inputs = weight.shape
        return PackedWeight(
            format=self,
            data=tiled(values, torch.int8, arena),
            outputs=outputs,
            inputs=inputs,
            scale=padded_outputs(scale, arena),
            bias=None if bias is None else padded_outputs(bias, arena),
        )

    def unpack(self, packed: PackedWeight) -> Tensor:
        """What the weight was rounded to, in fp32."""
        assert packed.scale is not None
        return (untiled(packed.data).float() * packed.scale[:, None])[: packed.outputs, : packed.inputs]

    def select(self, kernels: Kernels, packed: PackedWeight, outputs: Tensor) -> PackedWeight:  # noqa: ARG002
        """See `WeightFormat`."""
        return select_tiled(packed, outputs)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round each output's weights to 8 bits, symmetric about 0: int8 [outputs, inputs] and fp32 scale [outputs]."""
    codes = torch.empty(weight.shape, dtype=torch.int8)
    scale = torch.empty(len(weight), dtype=torch.float32)
    step = max(1, ROUNDED_AT_ONCE // max(1, weight.shape[1]))
    for first in range(0, len(weight), step):
        some = slice(first, first + step)
        wide = weight[some].float()
        scale[some] = wide.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / 127
        codes[some] = (wide / scale[some, None]).round()
    return codes, scale


INT8 = Int8Format(name="int8", kernel_id=2, bytes_per_weight=1, activations=torch.bfloat16, is_quantization=True)
