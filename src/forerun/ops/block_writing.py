"""Writes codes and scales as blocks of the formats of GGUF with 32 weights: the reverse of `BlockFormat.split`."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.ops.block_weight import BlockWeight

BLOCK = 32
"""Weights of a block."""

CODE_LIMITS = {"Q4_0": (-8, 7), "Q4_1": (0, 15), "Q5_0": (-16, 15), "Q8_0": (-128, 127)}
"""The whole numbers that the codes of each format can be."""


def pack_blocks(block_format: str, codes: Tensor, scales: Tensor, offsets: Tensor | None = None) -> BlockWeight:
    """Write codes as blocks of a format, as GGUF defines them.

    Args:
        block_format: a key of `CODE_LIMITS`.
        codes: [outputs, blocks, 32] whole numbers that the format's codes can be.
        scales: fp16 [outputs, blocks].
        offsets: fp16 [outputs, blocks], for Q4_1, whose weights are scale * code + offset.
    """
    outputs, blocks, _ = codes.shape
    if block_format == "Q8_0":
        parts = [codes.to(torch.int8).view(torch.uint8)]
    else:
        unsigned = (codes - CODE_LIMITS[block_format][0]).to(torch.uint8)
        parts = [_nibbles(unsigned & 15)]
        if block_format == "Q5_0":
            parts.insert(0, _fifth_bits(unsigned >> 4))
    numbers = [scales] if offsets is None else [scales, offsets]
    head = torch.stack(numbers, dim=-1).to(torch.float16).view(torch.uint8)
    data = torch.cat([head, *parts], dim=-1)
    return BlockWeight(format=block_format, shape=(outputs, blocks * BLOCK), data=data.view(outputs, -1))


def _nibbles(codes: Tensor) -> Tensor:
    """Four bits each: the first 16 weights of a block in the low halves of its bytes. [..., 32] -> [..., 16]"""
    return codes[..., :16] | codes[..., 16:] << 4


def _fifth_bits(bits: Tensor) -> Tensor:
    """A bit for each weight of a block, the lowest first: [..., 32] -> [..., 4]"""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (bits.reshape(*bits.shape[:-1], 4, 8) << shifts).sum(-1, dtype=torch.uint8)
