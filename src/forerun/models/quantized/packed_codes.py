"""Codes of a few bits that checkpoints pack into int32 words, and block weights that hold just the same values."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.errors import ModelError
from forerun.ops.block_weight import BlockWeight

WORD_BITS = 32
BLOCK = 32  # weights of a block in each of the formats here
CODE_LIMITS = {"Q4_0": (-8, 7), "Q5_0": (-16, 15), "Q8_0": (-128, 127)}
"""Block formats without an offset, the smallest first: the whole numbers that their codes can be."""


def unpack_words(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Codes from int32 words, the lowest bits first: [n, words] -> uint8 [n, words * (32 / bits)].

    `order[i]` says which of a word's codes comes at place i, where that is not the i-th; `bits` divides 32.
    """
    places = order or range(WORD_BITS // bits)
    mask = (1 << bits) - 1
    return torch.stack([(words >> bits * place & mask).to(torch.uint8) for place in places], dim=-1).flatten(1)


def block_weight(name: str, codes: Tensor, zeros: Tensor | None, scales: Tensor) -> BlockWeight:
    """The weight whose values are scale * (code - zero), in the smallest block format that has all of them.

    Such a format needs no offset: code - zero is a whole number. The values are exact, or there is an error.

    Args:
        name: of the weight, for errors.
        codes: [outputs, inputs] integers.
        zeros: [outputs, groups], of the same inputs as `scales`; None where the codes are signed.
        scales: [outputs, groups] of any float dtype; a group is inputs / groups inputs that follow each other.

    Raises:
        ModelError: a group is no multiple of a block, a scale is no fp16 number, or a code needs more than 8 bits.
    """
    outputs, inputs = codes.shape
    groups = scales.shape[1]
    size = inputs // max(1, groups)
    if inputs != groups * size or size % BLOCK:
        raise ModelError(
            f"{name}: got {inputs} inputs in {groups} groups; a group must be a multiple of {BLOCK} inputs; "
            "use a checkpoint of another group size"
        )
    signed = codes.to(torch.int16).view(outputs, groups, size)
    if zeros is not None:
        signed = signed - zeros.to(torch.int16)[..., None]
    blocks = signed.reshape(outputs, inputs // BLOCK, BLOCK)
    halfs = _as_fp16(name, scales).repeat_interleave(size // BLOCK, dim=1)
    low, high = (int(extreme) for extreme in signed.aminmax())
    for block_format, (least, most) in CODE_LIMITS.items():
        if least <= low and high <= most:
            return pack_blocks(block_format, blocks, halfs)
    raise ModelError(
        f"{name}: its codes less their zero points go from {low} to {high}; must fit in 8 bits with a sign; "
        "use a checkpoint with symmetric 8 bits, or with 4"
    )


def pack_blocks(block_format: str, codes: Tensor, scales: Tensor, offsets: Tensor | None = None) -> BlockWeight:
    """Write codes as blocks of a format, as GGUF defines them.

    Args:
        block_format: a format of 32 weights: of `CODE_LIMITS`, or "Q4_1", which has offsets and codes from 0 to 15.
        codes: [outputs, blocks, 32] whole numbers that the format's codes can be.
        scales: fp16 [outputs, blocks].
        offsets: fp16 [outputs, blocks], for Q4_1.
    """
    outputs, blocks, _ = codes.shape
    if block_format == "Q8_0":
        parts = [codes.to(torch.int8).view(torch.uint8)]
    else:
        unsigned = (codes - CODE_LIMITS.get(block_format, (0, 15))[0]).to(torch.uint8)
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
    return (bits.unflatten(-1, (4, 8)) << shifts).sum(-1, dtype=torch.uint8)


def _as_fp16(name: str, scales: Tensor) -> Tensor:
    """The same scales in fp16."""
    halfs = scales.to(torch.float16)
    changed = halfs.float() != scales.float()
    if changed.any():
        raise ModelError(
            f"{name}: scale {float(scales[changed][0])!r} is no fp16 number, which the block formats need; "
            "use a checkpoint with scales in fp16"
        )
    return halfs
