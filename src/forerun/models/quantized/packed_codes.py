"""Codes of a few bits that checkpoints pack into int32 words, and weights that hold just the same values."""

from __future__ import annotations

import logging
from functools import lru_cache

import torch
from torch import Tensor

from forerun.errors import ModelError
from forerun.ops.block_formats import BlockGroups
from forerun.ops.block_weight import BlockWeight, in_groups16
from forerun.ops.block_writing import BLOCK, CODE_LIMITS, pack_blocks

logger = logging.getLogger(__name__)

WORD_BITS = 32
WITHOUT_OFFSET = ("Q4_0", "Q5_0", "Q8_0")
"""Block formats that need none, the smallest first."""


def unpack_words(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Codes from int32 words, the lowest bits first: [n, words] -> uint8 [n, words * (32 / bits)].

    `order[i]` says which of a word's codes comes at place i, where that is not the i-th; `bits` divides 32.
    """
    places = order or range(WORD_BITS // bits)
    mask = (1 << bits) - 1
    return torch.stack([(words >> bits * place & mask).to(torch.uint8) for place in places], dim=-1).flatten(1)


def weight_of_groups(name: str, codes: Tensor, zeros: Tensor, scales: Tensor, group_of: Tensor) -> BlockWeight | Tensor:
    """As `block_weight`, where `group_of` [inputs] says the group of each input.

    Where the inputs of a block are of several groups, as with act-order, no block format has such scales: the values are then
    written out in fp32, which holds them exactly. That is said once.

    Raises:
        ModelError: as `block_weight`, or an input's group is not one of those that have scales.
    """
    groups = group_of.long()
    if groups.shape != codes.shape[1:] or not ((groups >= 0) & (groups < scales.shape[1])).all():
        raise ModelError(
            f"{name}: the groups of its inputs must be {codes.shape[1]} numbers from 0 to {scales.shape[1] - 1}, as many as "
            "have scales; download the model again"
        )
    if len(groups) % BLOCK == 0:
        by_block = groups.view(-1, BLOCK)
        if torch.equal(by_block, by_block[:, :1].expand_as(by_block)):
            return block_weight(name, codes, zeros[:, by_block[:, 0]], scales[:, by_block[:, 0]])
    _say_larger()
    signed = codes.to(torch.int16) - zeros.to(torch.int16)[:, groups]
    return signed.float() * _as_fp32(name, scales)[:, groups]


@lru_cache
def _say_larger() -> None:
    logger.warning(
        "weights whose groups are in the order of activations (act-order) take 4 bytes each, exactly as they are, since no "
        "kernel computes them in few bits; a checkpoint with desc_act=false or actorder 'static' stays small"
    )


def block_weight(name: str, codes: Tensor, zeros: Tensor | None, scales: Tensor) -> BlockWeight:
    """The weight whose values are scale * (code - zero), in the smallest block format that has all of them.

    Such a format needs no offset: code - zero is a whole number. Where a scale is no fp16 number, all are kept in fp32, in
    groups of 16. The values are exact, or there is an error.

    Args:
        name: of the weight, for errors.
        codes: [outputs, inputs] integers.
        zeros: [outputs, groups], of the same inputs as `scales`; None where the codes are signed.
        scales: [outputs, groups] of any float dtype; a group is inputs / groups inputs that follow each other.

    Raises:
        ModelError: a group is no multiple of a block, a scale is no number, or a code needs more than 8 bits.
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
    low, high = (int(extreme) for extreme in signed.aminmax())
    if low < -128 or high > 127:
        raise ModelError(
            f"{name}: its codes less their zero points go from {low} to {high}; must fit in 8 bits with a sign; "
            "use a checkpoint with symmetric 8 bits, or with 4"
        )
    wide = _as_fp32(name, scales)
    halves = wide.half()
    if not torch.equal(halves.float(), wide):
        return in_groups16(BlockGroups(signed.flatten(1).to(torch.int8), wide))
    limits = {row: CODE_LIMITS[row] for row in WITHOUT_OFFSET}
    smallest = next(row for row, (least, most) in limits.items() if least <= low and high <= most)
    blocks = signed.reshape(outputs, inputs // BLOCK, BLOCK)
    return pack_blocks(smallest, blocks, halves.repeat_interleave(size // BLOCK, dim=1))


def _as_fp32(name: str, scales: Tensor) -> Tensor:
    """The same scales in fp32.

    Raises:
        ModelError: one is no number.
    """
    wide = scales.float()
    wrong = wide[~wide.isfinite()]
    if len(wrong):
        raise ModelError(f"{name}: scale {float(wrong[0])!r} is no number; download the model again")
    return wide
