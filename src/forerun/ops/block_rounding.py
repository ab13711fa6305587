"""Rounds weights to block formats: four bits with a scale and perhaps an offset per 32 weights, or eight with a scale.

The search for a scale and an offset is the twin of csrc/block_rounding.h: the same operations in the same order, so that both give the
same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.errors import ModelError
from forerun.ops.block_formats import BLOCK_FORMATS
from forerun.ops.block_weight import BlockWeight
from forerun.ops.block_writing import BLOCK, CODE_LIMITS, pack_blocks

MOST_CODE = 15
TRIED_STEPS = (13.4, 13.9, 14.3, 14.7, 15.1, 15.6)
"""How many steps a block's range is cut into, one after the other: fewer than 15 spread them, more cut the ends off."""

TRIED_ENDS = (-6.8, -7.3, -7.7, -8.0, -8.3, -8.7, 7.0, 7.5)
"""Which code a block's weight of the largest magnitude has, one after the other: below -8 or above 7 it is cut off."""

REFITS = 2  # of the best of these
LEAST_IMPORTANCE = 1e-3  # of the mean: no input is for nothing
ROUNDED_AT_ONCE = 1 << 20  # weights: a few megabytes for each step between
MOST = torch.finfo(torch.float16).max  # scales and offsets are fp16


def round_to_q4_1(weight: Tensor, importance: Tensor | None = None) -> BlockWeight:
    """Round a weight [outputs, inputs] to scale * code + offset, with codes of four bits and 32 inputs to a block.

    Each block's scale and offset are searched for, so that the squared error, weighted by the importance of the inputs,
    is small: from several first guesses, each by the line that fits the weights best given their codes.

    Args:
        weight: of any float dtype; inputs are a multiple of 32.
        importance: [inputs], such as the mean square of what each is multiplied with; None for all alike.

    Raises:
        ModelError: a weight is no number, or too large for fp16.
    """
    shares = shares_of(importance, weight.shape[1]).view(1, -1, BLOCK)

    def rounded(blocks: Tensor) -> BlockWeight:
        line = _best_line(blocks, shares)
        return pack_blocks("Q4_1", line.codes(blocks), line.scale[..., 0], line.offset[..., 0])

    return _round_parts("Q4_1", weight, rounded)


def round_to_q4_0(weight: Tensor, importance: Tensor | None = None) -> BlockWeight:
    """Round a weight [outputs, inputs] to scale * code, with codes from -8 to 7 and 32 inputs to a block.

    Each block's scale, of either sign, is searched for like scale and offset of `round_to_q4_1`, which has the arguments.

    Raises:
        ModelError: a weight is no number, or too large for fp16.
    """
    shares = shares_of(importance, weight.shape[1]).view(1, -1, BLOCK)

    def rounded(blocks: Tensor) -> BlockWeight:
        scale = _best_scale(blocks, shares)
        return pack_blocks("Q4_0", _signed_codes(blocks, scale), scale[..., 0])

    return _round_parts("Q4_0", weight, rounded)


def round_to_q8_0(weight: Tensor) -> BlockWeight:
    """Round a weight [outputs, inputs] to scale * code, with codes from -127 to 127 and 32 inputs to a block.

    Raises:
        ModelError: a weight is no number, or too large for fp16.
    """

    def rounded(blocks: Tensor) -> BlockWeight:
        scale = (blocks.abs().amax(dim=-1, keepdim=True) / 127).half()
        codes = (blocks * _inverse(scale.float())).round_().clamp_(-127, 127)
        return pack_blocks("Q8_0", codes, scale[..., 0])

    return _round_parts("Q8_0", weight, rounded)


def round_rows(rows: Tensor, bits: int) -> Tensor:
    """Round what a weight is multiplied with to whole numbers of 8 or 16 bits times a scale, 32 inputs to a block.

    Of 8 bits the scale is fp32, a 127th of the block's largest magnitude (the twin of csrc/rounded_blocks.h); of 16 it is the
    power of two that gives the largest magnitude 15 bits (the twin of csrc/word_blocks.h).

    Args:
        rows: [T, inputs] of any float dtype, which are first rounded to bf16; inputs are a multiple of 32.
        bits: 8 or 16.

    Returns:
        The rounded values, [T, inputs] fp32; NaN where a block has a value that is no number.
    """
    blocks = rows.to(torch.bfloat16).float().view(len(rows), -1, BLOCK)
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    if bits == 8:
        steps = torch.full_like(largest, 127).div(largest)  # `127 / largest` would round twice
        steps = torch.where(largest > 0, steps.clamp(max=torch.finfo(torch.float32).max), 0.0)
        scale = largest / 127
    else:
        power = (15 - torch.frexp(largest).exponent).clamp(max=126)  # 2^-126 is the least normal number
        steps, scale = (torch.ldexp(torch.ones_like(largest), sign * power) for sign in (1, -1))
    rounded = torch.where(largest.isfinite(), (blocks * steps).round() * scale, torch.nan)
    return rounded.view(rows.shape)


def _round_parts(block_format: str, weight: Tensor, rounded: Callable[[Tensor], BlockWeight]) -> BlockWeight:
    """Round some outputs at a time: `rounded` takes them as blocks [n, blocks, 32] fp32.

    Each part's bytes go to their place at once. Kept until the last is there, parts would lie scattered in memory, which then
    takes three times their size.
    """
    outputs, inputs = weight.shape
    data = torch.empty(outputs, inputs // BLOCK * BLOCK_FORMATS[block_format].bytes, dtype=torch.uint8)
    first = 0
    for rows in parts_to_round(weight):
        data[first : first + len(rows)] = rounded(rows.view(len(rows), -1, BLOCK)).data
        first += len(rows)
    return BlockWeight(format=block_format, shape=(outputs, inputs), data=data)


def parts_to_round(weight: Tensor) -> Iterator[Tensor]:
    """A weight's outputs in fp32, some at a time: [n, inputs] each, contiguous, one after the other.

    Raises:
        ModelError: a weight is no number, or too large for fp16.
    """
    step = max(1, ROUNDED_AT_ONCE // max(1, weight.shape[1]))
    for rows in torch.split(weight, step):
        wide = rows.float().contiguous()
        for extreme in (float(found) for found in wide.aminmax()):  # both are NaN where any weight is
            if not -MOST <= extreme <= MOST:
                raise ModelError(
                    f"weights: got {extreme!r}; must be numbers from {-MOST:.0f} to {MOST:.0f} to be rounded to blocks; "
                    "download the model again, or leave quantization out"
                )
        yield wide


def shares_of(importance: Tensor | None, inputs: int) -> Tensor:
    """Each input's share of its block's importance: [inputs] fp32, adding up to 1 in each block."""
    if importance is None:
        return torch.full((inputs,), 1 / BLOCK)
    known = importance.float()
    blocks = known.clamp(min=LEAST_IMPORTANCE * float(known.mean())).view(-1, BLOCK)
    return (blocks * _inverse(blocks.sum(-1, keepdim=True))).flatten()


@dataclass(frozen=True, slots=True)
class _Line:
    """scale * code + offset, for blocks [outputs, blocks, 1]."""

    scale: Tensor
    offset: Tensor

    @staticmethod
    def of(scale: Tensor, offset: Tensor) -> _Line:
        """Round both to fp16."""
        return _Line(_as_half(scale), _as_half(offset))

    def codes(self, rows: Tensor) -> Tensor:
        """The nearest codes of weights [outputs, blocks, 32], as whole fp32 numbers from 0 to 15."""
        return ((rows - self.offset) * _inverse(self.scale)).clamp_(0, MOST_CODE).round_()

    def error(self, rows: Tensor, shares: Tensor) -> Tensor:
        """The weighted squared error of each block."""
        apart = self.codes(rows).mul_(self.scale).add_(self.offset).sub_(rows)
        return _sum(apart.square_().mul_(shares))


def _best_line(rows: Tensor, shares: Tensor) -> _Line:
    """The line with the least error that is found."""
    low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    best = _Line.of((high - low) / MOST_CODE, low)
    least = best.error(rows, shares)
    for steps in TRIED_STEPS:
        scale = (high - low) / steps
        line = _fitted(rows, shares, _Line(scale, (low + high - MOST_CODE * scale) / 2))
        best, least = _better(best, least, line, line.error(rows, shares))
    for _ in range(REFITS):
        line = _fitted(rows, shares, best)
        best, least = _better(best, least, line, line.error(rows, shares))
    return best


def _better(best: _Line, least: Tensor, other: _Line, error: Tensor) -> tuple[_Line, Tensor]:
    """Block by block the line with the lower error, and that error."""
    wins = error < least
    line = _Line(torch.where(wins, other.scale, best.scale), torch.where(wins, other.offset, best.offset))
    return line, torch.where(wins, error, least)


def _fitted(rows: Tensor, shares: Tensor, line: _Line) -> _Line:
    """The line that fits the weights best, given the codes that another gives them: weighted linear regression."""
    codes = line.codes(rows)
    mean_code, mean_weight = _sum(codes * shares), _sum(rows * shares)
    apart = codes - mean_code
    spread = _sum(apart.square() * shares)
    common = _sum(apart * (rows - mean_weight) * shares)
    scale = _as_half(common * _inverse(spread))
    return _Line.of(scale, mean_weight - scale * mean_code)


def _best_scale(rows: Tensor, shares: Tensor) -> Tensor:
    """The scale [outputs, blocks, 1] with the least error that is found."""
    extreme = rows.gather(-1, rows.abs().argmax(-1, keepdim=True))
    best = _as_half(extreme / CODE_LIMITS["Q4_0"][0])
    least = _scale_error(rows, shares, best)

    def keep_better(other: Tensor) -> None:
        nonlocal best, least
        error = _scale_error(rows, shares, other)
        wins = error < least
        best, least = torch.where(wins, other, best), torch.where(wins, error, least)

    for end in TRIED_ENDS:
        keep_better(_fitted_scale(rows, shares, extreme / end))
    for _ in range(REFITS):
        keep_better(_fitted_scale(rows, shares, best))
    return best


def _signed_codes(rows: Tensor, scale: Tensor) -> Tensor:
    """The nearest codes of weights [outputs, blocks, 32], as whole fp32 numbers from -8 to 7."""
    return (rows * _inverse(scale)).round_().clamp_(*CODE_LIMITS["Q4_0"])


def _scale_error(rows: Tensor, shares: Tensor, scale: Tensor) -> Tensor:
    """The weighted squared error of each block."""
    return _sum(_signed_codes(rows, scale).mul_(scale).sub_(rows).square_().mul_(shares))


def _fitted_scale(rows: Tensor, shares: Tensor, scale: Tensor) -> Tensor:
    """The scale that fits the weights best, given the codes that another gives them."""
    codes = _signed_codes(rows, scale)
    return _as_half(_sum(codes * rows * shares) * _inverse(_sum(codes.square() * shares)))


def _sum(terms: Tensor) -> Tensor:
    """[..., 32] -> [..., 1]: the upper half onto the lower, until one is left."""
    while (half := terms.shape[-1] // 2) > 0:
        terms = terms[..., :half] + terms[..., half:]
    return terms


def _as_half(numbers: Tensor) -> Tensor:
    """The nearest fp16 numbers, of the two zeros the positive one."""
    return numbers.half().float().add_(0.0)


def _inverse(numbers: Tensor) -> Tensor:
    """1 / number, and 0 for 0."""
    return torch.where(numbers == 0, 0.0, 1 / numbers)
