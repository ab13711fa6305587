"""Rounds weights to block formats: four bits with a scale and an offset per 32 weights, or eight with a scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.ops.block_weight import BlockWeight
from forerun.ops.block_writing import BLOCK, pack_blocks

MOST_CODE = 15
TRIED_STEPS = (13.4, 13.9, 14.3, 14.7, 15.1, 15.6)
"""How many steps a block's range is cut into, one after the other: fewer than 15 spread them, more cut the ends off."""

REFITS = 2  # of the best of these
LEAST_IMPORTANCE = 1e-3  # of the mean: no input is for nothing
ROUNDED_AT_ONCE = 1 << 20  # weights: a few megabytes for each step between


def round_to_q4_1(weight: Tensor, importance: Tensor | None = None) -> BlockWeight:
    """Round a weight [outputs, inputs] to scale * code + offset, with codes of four bits and 32 inputs to a block.

    Each block's scale and offset are searched for, so that the squared error, weighted by the importance of the inputs,
    is small: from several first guesses, each by the line that fits the weights best given their codes.

    Args:
        weight: of any float dtype; inputs are a multiple of 32.
        importance: [inputs], such as the mean square of what each is multiplied with; None for all alike.
    """
    outputs, inputs = weight.shape
    shares = _shares(importance, inputs)
    codes = torch.empty(outputs, inputs // BLOCK, BLOCK, dtype=torch.uint8)
    lines = torch.empty(2, outputs, inputs // BLOCK, dtype=torch.float16)
    step = max(1, ROUNDED_AT_ONCE // inputs)
    for first in range(0, outputs, step):
        rows = weight[first : first + step].float().reshape(-1, inputs // BLOCK, BLOCK)
        line = _best_line(rows, shares)
        codes[first : first + step] = line.codes(rows)
        lines[0, first : first + step], lines[1, first : first + step] = line.scale[..., 0], line.offset[..., 0]
    return pack_blocks("Q4_1", codes, lines[0], lines[1])


def round_to_q8_0(weight: Tensor) -> BlockWeight:
    """Round a weight [outputs, inputs] to scale * code, with codes from -127 to 127 and 32 inputs to a block."""
    rows = weight.float().reshape(len(weight), -1, BLOCK)
    scale = (rows.abs().amax(dim=-1, keepdim=True) / 127).half()
    codes = (rows * _inverse(scale.float())).round().clamp(-127, 127)
    return pack_blocks("Q8_0", codes, scale[..., 0])


@dataclass(frozen=True, slots=True)
class _Line:
    """scale * code + offset, for blocks [outputs, blocks, 1]; both are fp16 numbers."""

    scale: Tensor
    offset: Tensor

    @staticmethod
    def of(scale: Tensor, offset: Tensor) -> _Line:
        """Round both to fp16."""
        return _Line(scale.half().float(), offset.half().float())

    def codes(self, rows: Tensor) -> Tensor:
        """The nearest codes of weights [outputs, blocks, 32], as whole fp32 numbers from 0 to 15."""
        return ((rows - self.offset) * _inverse(self.scale)).round_().clamp_(0, MOST_CODE)

    def error(self, rows: Tensor, shares: Tensor) -> Tensor:
        """The weighted squared error of each block."""
        found = self.codes(rows).mul_(self.scale).add_(self.offset)
        return (found.sub_(rows).square_().mul_(shares)).sum(-1, keepdim=True)


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
    mean_code = (codes * shares).sum(-1, keepdim=True)
    mean_weight = (rows * shares).sum(-1, keepdim=True)
    apart = codes - mean_code
    spread = (apart.square() * shares).sum(-1, keepdim=True)
    common = (apart * (rows - mean_weight) * shares).sum(-1, keepdim=True)
    scale = common * _inverse(spread)
    return _Line.of(scale, mean_weight - scale.half().float() * mean_code)


def _shares(importance: Tensor | None, inputs: int) -> Tensor:
    """Each input's share of its block's importance: [1, blocks, 32], adding up to 1 in each block."""
    if importance is None:
        return torch.full((1, inputs // BLOCK, BLOCK), 1 / BLOCK)
    known = importance.float()
    known = known.clamp(min=LEAST_IMPORTANCE * float(known.mean()))
    blocks = known.view(1, -1, BLOCK)
    return blocks * _inverse(blocks.sum(-1, keepdim=True))


def _inverse(numbers: Tensor) -> Tensor:
    """1 / number, and 0 for 0."""
    return torch.where(numbers == 0, 0.0, 1 / numbers)
