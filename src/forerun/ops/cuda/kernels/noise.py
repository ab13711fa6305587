"""Keyed noise and exact arithmetic in Triton; `ops.cuda.noise` is the twin, `core.random_bits` and `core.exact_math` define it.

All of it is integer arithmetic, or single IEEE operations in a fixed order. So whoever launches a kernel that uses it turns
off the fusion of multiplications and additions (`EXACT`), which would round once where the definition rounds twice.
"""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from forerun.core import exact_math, random_bits

EXACT: dict[str, Any] = {"enable_fp_fusion": False}
"""Options of a launch whose results are defined to the bit."""

_GAMMA = tl.constexpr(random_bits.GAMMA)
_MIX_1 = tl.constexpr(random_bits.MIX_1)
_MIX_2 = tl.constexpr(random_bits.MIX_2)
_UNIT = tl.constexpr(random_bits.UNIT)
_TARGET_STEP = tl.constexpr((int(random_bits.Stream.TARGET) + 1) * random_bits.GAMMA & random_bits.MASK)
_SQRT_HALF = tl.constexpr(math.sqrt(0.5))
_LN2 = tl.constexpr(math.log(2.0))
_LOG2_E = tl.constexpr(math.log2(math.e))
_LOG_TERMS = tl.constexpr(exact_math.LOG_TERMS)
_LEAST_LOGIT = tl.constexpr(exact_math.LEAST_LOGIT)
_WEIGHT_UNITS = tl.constexpr(2.0**exact_math.WEIGHT_BITS)
_ROUNDING_32 = tl.constexpr(1.5 * 2**23)  # added to a float, it leaves no bits for a fraction
_ROUNDING_BITS_32 = tl.constexpr(0x4B400000)
_ROUNDING_64 = tl.constexpr(1.5 * 2**52)

_BLOCK = 1024


@triton.jit
def mix(bits):
    """SplitMix64's finaliser on uint64 bits."""
    bits = (bits ^ (bits >> 30)) * _MIX_1
    bits = (bits ^ (bits >> 27)) * _MIX_2
    return bits ^ (bits >> 31)


@triton.jit
def row_key(seed, position):
    """The key of the target's noise at a position: seed int64, position an integer -> uint64."""
    key = mix((seed.to(tl.uint64, bitcast=True) + 1) * _GAMMA)
    key = mix(key + (position.to(tl.uint64) + 1) * _GAMMA)
    key = mix(key + _TARGET_STEP)
    return mix(key + _GAMMA)


@triton.jit
def uniform(key, token_ids):
    """Numbers uniform in (0, 1) of tokens of the row with this key: uint64, integers -> fp64."""
    bits = mix((token_ids.to(tl.uint64) + 1) * _GAMMA + key) >> 12
    return (bits.to(tl.float64) + 0.5) * _UNIT


@triton.jit
def log(values):
    """`exact_math.log` of positive normal fp64 numbers."""
    bits = values.to(tl.int64, bitcast=True)
    exponent = (bits >> 52) - 1022
    mantissa = ((bits & 0x000FFFFFFFFFFFFF) | 0x3FE0000000000000).to(tl.float64, bitcast=True)
    is_low = mantissa < _SQRT_HALF
    mantissa = tl.where(is_low, mantissa + mantissa, mantissa)
    exponent = exponent - is_low.to(tl.int64)
    above_one = mantissa - 1.0
    ratio = above_one / (above_one + 2.0)
    square = ratio * ratio
    series = square * (1.0 / (2 * _LOG_TERMS + 1)) + 1.0 / (2 * _LOG_TERMS - 1)
    for n in tl.static_range(_LOG_TERMS - 2, 0, -1):
        series = series * square + 1.0 / (2 * n + 1)
    series = series * square
    twice = ratio + ratio
    return exponent.to(tl.float64) * _LN2 + (twice + twice * series)


@triton.jit
def score(logits, uniforms):
    """Logit + gumbel: fp32 and fp64 -> fp64, the bits of `ops.race.score`."""
    return logits.to(tl.float64) - log(-log(1.0 - uniforms))


@triton.jit
def weight(logits):
    """`exact_math.weights` of fp32 logits of 0 or less: whole numbers of 2**-40 as int64."""
    clamped = tl.maximum(logits, _LEAST_LOGIT)
    shifted = clamped * _LOG2_E + _ROUNDING_32
    whole = shifted - _ROUNDING_32
    rest = clamped - whole * _LN2
    series = rest * (1.0 / 120.0) + 1.0 / 24.0
    series = series * rest + 1.0 / 6.0
    series = series * rest + 0.5
    series = series * rest + 1.0
    series = series * rest + 1.0
    power = ((shifted.to(tl.int32, bitcast=True) - (_ROUNDING_BITS_32 - 127)) << 23).to(tl.float32, bitcast=True)
    scaled = (series * power).to(tl.float64) * _WEIGHT_UNITS
    return ((scaled + _ROUNDING_64) - _ROUNDING_64).to(tl.int64)


@triton.jit
def order_key(values):
    """int32 keys in the order of fp32 numbers: both zeros are equal, NaN is above all."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(values != values, 0x7FFFFFFF, keys)


@triton.jit
def key_value(keys):
    """The fp32 number of an order key: int32 -> fp32."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _uniform_rows(keys, out, num_tokens, BLOCK: tl.constexpr):
    row, token_ids = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + row).to(tl.uint64, bitcast=True)
    tl.store(out + row.to(tl.int64) * num_tokens + token_ids, uniform(key, token_ids), token_ids < num_tokens)


@triton.jit
def _row_keys(seeds, positions, out, num_rows, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(seeds + rows, rows < num_rows, 0)
    position = tl.load(positions + rows, rows < num_rows, 0)
    tl.store(out + rows, row_key(seed, position).to(tl.int64, bitcast=True), rows < num_rows)


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """The keys of the target's noise at each row: [R] int64 and [R] int32 -> [R] int64; see `ops.cuda.noise`."""
    keys = seeds.new_empty(seeds.shape)
    _row_keys[(triton.cdiv(len(seeds), _BLOCK),)](seeds, positions, keys, len(seeds), BLOCK=_BLOCK)
    return keys


def uniform_rows(keys: Tensor, uniform: Tensor) -> None:
    """Write the numbers uniform in (0, 1) of each key's row: keys [R] int64, uniform [R, V] fp64 contiguous."""
    num_rows, num_tokens = uniform.shape
    _uniform_rows[(num_rows, triton.cdiv(num_tokens, _BLOCK))](keys, uniform, num_tokens, BLOCK=_BLOCK, **EXACT)
