"""Logarithm, exponential and the nucleus's share by single IEEE operations, which give the same bits on every machine.

The libraries' own functions differ in the last bit from one build to the next. What a seed's text hangs on is therefore
computed by additions, multiplications and divisions in a fixed order: here with NumPy, and in csrc/sampling.h, operation
by operation the same, with the CPU kernels.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]

LOG_TERMS = 10  # of the series of atanh: the next would be below 2**-64
WEIGHT_BITS = 40  # a weight is a whole number of 2**-40
LEAST_LOGIT = -60.0  # of any lower logit the weight is 0, too
_LOG2_E, _LN2 = np.float32(math.log2(math.e)), np.float32(math.log(2.0))
_ROUNDING = np.float32(1.5 * 2**23)  # adding it leaves no bits for a fraction
_ROUNDING_BITS = 0x4B400000
_EXP_TERMS = [np.float32(1.0 / math.factorial(n)) for n in range(5, -1, -1)]


def log(values: Float64s) -> Float64s:
    """Natural logarithm of positive finite numbers, within two units of the last place, close to 1 too.

    A number is 2**e * m with m from sqrt(1/2) to sqrt(2), and log(m) = 2 atanh((m - 1) / (m + 1)), by its series.
    """
    mantissa, exponent = np.frexp(values)
    is_low = mantissa < math.sqrt(0.5)
    mantissa = np.where(is_low, mantissa + mantissa, mantissa)
    above_one = mantissa - 1.0
    ratio = above_one / (above_one + 2.0)
    square = ratio * ratio
    series = np.full_like(square, 1.0 / (2 * LOG_TERMS + 1))
    for n in range(LOG_TERMS - 1, 0, -1):
        series = series * square + 1.0 / (2 * n + 1)
    series = series * square
    twice = ratio + ratio
    result: Float64s = (exponent - is_low) * math.log(2.0) + (twice + twice * series)
    return result


def weights(logits: Float32s) -> npt.NDArray[np.int64]:
    """exp of logits of 0 or less, as whole numbers of 2**-40: sums of them are exact, so their order cannot matter.

    They decide only where a nucleus ends, so the series stops where it is right to 6e-6 of a weight.
    """
    clamped = np.maximum(logits, np.float32(LEAST_LOGIT))
    shifted = clamped * _LOG2_E + _ROUNDING
    whole = shifted - _ROUNDING
    rest = clamped - whole * _LN2
    series = np.full_like(rest, _EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        series = series * rest + term
    power = ((shifted.view(np.int32) - (_ROUNDING_BITS - 127)) << 23).view(np.float32)
    whole_weights: npt.NDArray[np.int64] = np.rint((series * power).astype(np.float64) * 2.0**WEIGHT_BITS).astype(
        np.int64
    )
    return whole_weights


def nucleus_weight(total: int, top_p: float) -> int:
    """What the weights of a nucleus must reach together: `top_p` of their `total`, rounded up."""
    return min(max(math.ceil(float(total) * top_p), 1), total)
