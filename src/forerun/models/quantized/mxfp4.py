"""MXFP4 (OCP Microscaling Formats 1.0) as gpt-oss stores the matrices of its experts, all of a layer in one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from forerun.models.quantized.layout import Kinds, PartKind, Parts, Shapes, expect_shape
from forerun.ops.block_weight import BlockWeight

BLOCK_BYTES = 16  # of two codes each


@dataclass(frozen=True, slots=True)
class MXFP4Layout:
    """2 ^ (scale - 127) * code, the codes floats of four bits; a scale is of 32 inputs.

    `blocks` uint8 [experts, outputs, inputs / 32, 16], the first of two inputs in the low bits, and `scales` uint8
    [experts, outputs, inputs / 32]. The weight is [experts * outputs, inputs].
    """

    main: ClassVar[str] = "blocks"
    needed: ClassVar[Kinds] = {"blocks": PartKind((torch.uint8,), (4,)), "scales": PartKind((torch.uint8,), (3,))}
    optional: ClassVar[Kinds] = {}

    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        """See `QuantizedLayout`: [experts, outputs, inputs]."""
        experts, outputs, blocks, size = shapes["blocks"]
        return experts, outputs, blocks * 2 * size

    def load(self, name: str, parts: Parts) -> BlockWeight:
        """See `QuantizedLayout`; GGUF's blocks have the codes of the first 16 inputs in their bytes' low bits."""
        pairs, scales = parts["blocks"], parts["scales"]
        experts, outputs, blocks, _ = pairs.shape
        expect_shape(name, "blocks", pairs, (experts, outputs, blocks, BLOCK_BYTES))
        expect_shape(name, "scales", scales, (experts, outputs, blocks))
        codes = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(3)
        halves = codes[..., :BLOCK_BYTES] | codes[..., BLOCK_BYTES:] << 4
        data = torch.cat([scales[..., None], halves], dim=-1).flatten(2).flatten(0, 1)
        return BlockWeight(format="MXFP4", shape=(experts * outputs, blocks * 2 * BLOCK_BYTES), data=data)


def read_mxfp4(settings: Mapping[str, Any]) -> MXFP4Layout:  # noqa: ARG001 (modules that are not quantized show by their names)
    """See `MethodReader`."""
    return MXFP4Layout()
