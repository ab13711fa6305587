"""The block formats of GGUF: where a block's bytes hold the codes, scales and offsets of its weights.

Whatever the format, a weight is scale * code + offset: the code is a small integer of its own, scale and offset belong to a
group of 16 or 32 weights that follow each other along the inputs. Scales are exact in fp32, and so is scale * code; adding
the offset rounds once. So every format is read into the same three tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

NORMAL_FLOAT_4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the codes of IQ4_NL and IQ4_XS stand for."""

HALVES_OF_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""What the codes of MXFP4 stand for, times 2: floats of 2 exponent bits and 1 mantissa bit."""


@dataclass(frozen=True, slots=True)
class BlockGroups:
    """Weights in groups that share a scale: codes int8 [n, weights], scale and offset fp32 [n, groups]; no offset: None.

    n is whatever is read together: blocks, or the outputs of a weight.
    """

    codes: Tensor
    scale: Tensor
    offset: Tensor | None = None

    def values(self) -> Tensor:
        """scale * code + offset: [n, weights] fp32"""
        codes = self.codes.unflatten(1, (self.scale.shape[1], -1))
        values = self.scale[..., None] * codes.float()
        return (values if self.offset is None else values + self.offset[..., None]).flatten(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    """How `weights` weights lie in a block of `bytes` bytes, `group` of them to a scale.

    `split` reads blocks [n, bytes] uint8 as their groups.
    """

    name: str
    weights: int
    bytes: int
    group: int
    split: Callable[[Tensor], BlockGroups]


def _halfs(blocks: Tensor, first: int, last: int) -> Tensor:
    """fp16 numbers in bytes [first, last) of each block: [n, (last - first) / 2] fp32"""
    return blocks[:, first:last].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """The low four bits of all bytes, then the high ones: [n, ..., bytes] -> [n, ..., 2 * bytes] uint8"""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _bits(packed: Tensor, width: int) -> Tensor:
    """The lowest `width` bits of all bytes, then the next, and so on: [n, ..., bytes] -> [n, ..., 8 / width, bytes] uint8"""
    return torch.stack([packed >> shift & (1 << width) - 1 for shift in range(0, 8, width)], dim=-2)


def _signed(codes: Tensor, zero: int = 0) -> Tensor:
    return codes.to(torch.int8) - zero


def _fifth_bits(packed: Tensor) -> Tensor:
    """A bit for each of 32 weights, eight to a byte, as the value 16 or 0: [n, 4] -> [n, 32] uint8"""
    return _bits(packed, 1).transpose(1, 2).flatten(1) << 4


def _split_q8_0(blocks: Tensor) -> BlockGroups:
    return BlockGroups(blocks[:, 2:].contiguous().view(torch.int8), _halfs(blocks, 0, 2))


def _split_q4_0(blocks: Tensor) -> BlockGroups:
    return BlockGroups(_signed(_nibbles(blocks[:, 2:]), 8), _halfs(blocks, 0, 2))


def _split_q4_1(blocks: Tensor) -> BlockGroups:
    return BlockGroups(_signed(_nibbles(blocks[:, 4:])), _halfs(blocks, 0, 2), _halfs(blocks, 2, 4))


def _split_q5_0(blocks: Tensor) -> BlockGroups:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return BlockGroups(_signed(codes, 16), _halfs(blocks, 0, 2))


def _split_q5_1(blocks: Tensor) -> BlockGroups:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return BlockGroups(_signed(codes), _halfs(blocks, 0, 2), _halfs(blocks, 2, 4))


def _split_q2_k(blocks: Tensor) -> BlockGroups:
    steps, packed = blocks[:, :16], blocks[:, 16:80]
    scale, minimum = _halfs(blocks, 80, 84).split(1, dim=1)
    codes = _bits(packed.unflatten(1, (2, 32)), 2).flatten(1)
    return BlockGroups(_signed(codes), scale * (steps & 15).float(), -(minimum * (steps >> 4).float()))


def _split_q3_k(blocks: Tensor) -> BlockGroups:
    high, packed, steps = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    low_bits = _nibbles(steps[:, :8])  # of sixteen 6-bit steps
    high_bits = _bits(steps[:, 8:], 2).flatten(1)
    scale = _halfs(blocks, 108, 110) * _signed(low_bits | high_bits << 4, 32).float()
    third_bits = _bits(high, 1).flatten(1) << 2
    codes = _bits(packed.unflatten(1, (2, 32)), 2).flatten(1) | third_bits
    return BlockGroups(_signed(codes, 4), scale)


def _steps_of_k(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The 6-bit steps of eight scales and eight minima: [n, 12] -> twice [n, 8] fp32"""
    first, second, rest = packed.split(4, dim=1)
    scales = torch.cat([first & 63, (rest & 15) | (first >> 6 << 4)], dim=1)
    minima = torch.cat([second & 63, (rest >> 4) | (second >> 6 << 4)], dim=1)
    return scales.float(), minima.float()


def _groups_of_k(blocks: Tensor, codes: Tensor) -> BlockGroups:
    scale, minimum = _halfs(blocks, 0, 4).split(1, dim=1)
    scales, minima = _steps_of_k(blocks[:, 4:16])
    return BlockGroups(_signed(codes), scale * scales, -(minimum * minima))


def _split_q4_k(blocks: Tensor) -> BlockGroups:
    return _groups_of_k(blocks, _nibbles(blocks[:, 16:].unflatten(1, (4, 32))).flatten(1))


def _split_q5_k(blocks: Tensor) -> BlockGroups:
    low = _nibbles(blocks[:, 48:].unflatten(1, (4, 32))).flatten(1)
    return _groups_of_k(blocks, low | _bits(blocks[:, 16:48], 1).flatten(1) << 4)


def _split_q6_k(blocks: Tensor) -> BlockGroups:
    low = _nibbles(blocks[:, :128].unflatten(1, (2, 64))).flatten(1)
    high = _bits(blocks[:, 128:192].unflatten(1, (2, 32)), 2).flatten(1)
    steps = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return BlockGroups(_signed(low | high << 4, 32), _halfs(blocks, 208, 210) * steps)


def _named(codes: Tensor, values: tuple[int, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.int8)[codes.int()]


def _split_iq4_nl(blocks: Tensor) -> BlockGroups:
    return BlockGroups(_named(_nibbles(blocks[:, 2:]), NORMAL_FLOAT_4), _halfs(blocks, 0, 2))


def _split_iq4_xs(blocks: Tensor) -> BlockGroups:
    high = _bits(blocks[:, 2:4], 2).transpose(1, 2).flatten(1)
    low = torch.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], dim=-1).flatten(1)
    steps = _signed(low | high << 4, 32).float()
    codes = _nibbles(blocks[:, 8:].unflatten(1, (8, 16))).flatten(1)
    return BlockGroups(_named(codes, NORMAL_FLOAT_4), _halfs(blocks, 0, 2) * steps)


def _split_mxfp4(blocks: Tensor) -> BlockGroups:
    exponent = blocks[:, :1].float() - 128  # one less than E8M0 has it, since the codes' values are doubled
    return BlockGroups(_named(_nibbles(blocks[:, 1:]), HALVES_OF_E2M1), torch.ldexp(torch.ones(()), exponent))


def _split_groups16(blocks: Tensor) -> BlockGroups:
    scale, offset = blocks[:, :8].contiguous().view(torch.float32).split(1, dim=1)
    return BlockGroups(blocks[:, 8:].contiguous().view(torch.int8), scale, offset)


_ROWS = (
    BlockFormat(name="Q8_0", weights=32, bytes=34, group=32, split=_split_q8_0),
    BlockFormat(name="Q4_0", weights=32, bytes=18, group=32, split=_split_q4_0),
    BlockFormat(name="Q4_1", weights=32, bytes=20, group=32, split=_split_q4_1),
    BlockFormat(name="Q5_0", weights=32, bytes=22, group=32, split=_split_q5_0),
    BlockFormat(name="Q5_1", weights=32, bytes=24, group=32, split=_split_q5_1),
    BlockFormat(name="Q2_K", weights=256, bytes=84, group=16, split=_split_q2_k),
    BlockFormat(name="Q3_K", weights=256, bytes=110, group=16, split=_split_q3_k),
    BlockFormat(name="Q4_K", weights=256, bytes=144, group=32, split=_split_q4_k),
    BlockFormat(name="Q5_K", weights=256, bytes=176, group=32, split=_split_q5_k),
    BlockFormat(name="Q6_K", weights=256, bytes=210, group=16, split=_split_q6_k),
    BlockFormat(name="IQ4_NL", weights=32, bytes=18, group=32, split=_split_iq4_nl),
    BlockFormat(name="IQ4_XS", weights=256, bytes=136, group=32, split=_split_iq4_xs),
    BlockFormat(name="MXFP4", weights=32, bytes=17, group=32, split=_split_mxfp4),
    BlockFormat(name="GROUPS16", weights=16, bytes=24, group=16, split=_split_groups16),
)

BLOCK_FORMATS: dict[str, BlockFormat] = {row.name: row for row in _ROWS}
"""Every block format by its name, GGUF's; and GROUPS16, which holds the weights of every other: an fp32 scale, an fp32 offset
and sixteen int8 codes."""
