"""Keyed noise and exact arithmetic on tensors: the twin of `kernels.noise`, with the bits of `core.random_bits`.

torch has no unsigned arithmetic, so 64 bits are int64: sums and products wrap alike, and a shift to the right clears what
the sign filled.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forerun.core import exact_math
from forerun.core.random_bits import GAMMA, MIX_1, MIX_2, UNIT, Stream


def _signed(bits: int) -> int:
    """The int64 with the bits of an unsigned one."""
    return bits - (bits >> 63 << 64)


def _shift(bits: Tensor, count: int) -> Tensor:
    return (bits >> count) & ((1 << (64 - count)) - 1)


def mix(bits: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 bits of any shape."""
    bits = (bits ^ _shift(bits, 30)) * _signed(MIX_1)
    bits = (bits ^ _shift(bits, 27)) * _signed(MIX_2)
    return bits ^ _shift(bits, 31)


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """`random_bits.key_of(seed, position, Stream.TARGET, 0)` of each row: [R] int64 and [R] -> [R] int64."""
    keys = torch.zeros_like(seeds)
    for values in (seeds, positions.long(), torch.full_like(seeds, int(Stream.TARGET)), torch.zeros_like(seeds)):
        keys = mix(keys + (values + 1) * _signed(GAMMA))
    return keys


def uniform_rows(keys: Tensor, uniform: Tensor) -> None:
    """Write the numbers uniform in (0, 1) of each key's row: keys [R] int64, uniform [R, V] fp64."""
    counters = torch.arange(1, uniform.shape[1] + 1, device=keys.device) * _signed(GAMMA)
    bits = mix(keys[:, None] + counters)
    uniform.copy_((_shift(bits, 12).double() + 0.5) * UNIT)


def log(values: Tensor) -> Tensor:
    """`exact_math.log` of a fp64 tensor: the same operations, so the same bits."""
    mantissa, exponent = torch.frexp(values)
    is_low = mantissa < math.sqrt(0.5)
    mantissa = torch.where(is_low, mantissa + mantissa, mantissa)
    above_one = mantissa - 1.0
    ratio = above_one / (above_one + 2.0)
    square = ratio * ratio
    series = torch.full_like(square, 1.0 / (2 * exact_math.LOG_TERMS + 1))
    for n in range(exact_math.LOG_TERMS - 1, 0, -1):
        series = series * square + 1.0 / (2 * n + 1)
    series = series * square
    twice = ratio + ratio
    return (exponent - is_low.to(exponent.dtype)).double() * math.log(2.0) + (twice + twice * series)


def weights(logits: Tensor) -> Tensor:
    """`exact_math.weights` of fp32 logits of 0 or less: whole numbers of 2**-40 as int64."""
    found = exact_math.weights(logits.reshape(-1).numpy(force=True))
    return torch.from_numpy(found).view(logits.shape).to(logits.device)
