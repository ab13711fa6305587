"""The race of the tokens, which draws one with exactly its probability (the Gumbel-max trick, the exponential race).

Token t has the score logit + gumbel, where gumbel = -log(noise) and noise is exponential; the highest score wins, of equal
ones the lowest token id. Noise is keyed, so the winner is a function of seed, position and logits.

Few tokens can win: noise is never below the uniform number that it is made from, so a comparison that needs no exact
logarithm rules out nearly all. csrc/sampling.h is the twin that runs on the CPU kernels, with the same bits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from forerun.core.exact_math import Float32s, Float64s, log
from forerun.core.random_bits import exponential, uniform_row, uniforms

MARGIN = 1e-5
"""Larger than the error of the approximate comparison."""


def race(logits: Float32s, token_ids: npt.NDArray[np.int64] | None, *, key: int, count: int = 1) -> list[int]:
    """The first `count` tokens, the winner first; fewer where fewer have a chance.

    Args:
        logits: [n], none above 0.
        token_ids: [n] ascending; None for a whole vocabulary.
        key: of the row's noise, see `random_bits.key_of`.
        count: how many to return.
    """
    uniform = uniform_row(key, len(logits)) if token_ids is None else uniforms(key, token_ids)
    may_win = _may_win(logits, uniform, count)
    scores = score(logits[may_win], uniform[may_win])
    order = np.argsort(-scores, kind="stable")[:count]
    winners = may_win[order[scores[order] > -np.inf]]
    ids: list[int] = (winners if token_ids is None else token_ids[winners]).tolist()
    return ids


def naive_race(logits: Float32s, *, key: int, count: int = 1) -> list[int]:
    """`race` over a whole vocabulary, every score computed: the oracle of the tests."""
    scores = score(logits, uniform_row(key, len(logits)))
    order = np.argsort(-scores, kind="stable")[:count]
    ids: list[int] = order[scores[order] > -np.inf].tolist()
    return ids


def score(logits: Float32s, uniform: Float64s) -> Float64s:
    """Logit + gumbel, exactly as csrc/sampling.h computes it."""
    return logits - log(exponential(uniform))


def lead(logits: Float32s, token_ids: npt.NDArray[np.int64], *, key: int) -> float:
    """How far the first of two tokens is ahead of the second: the difference of their scores, in fp32."""
    first, second = score(logits, uniforms(key, token_ids))
    return float(np.float32(first - second))


def _may_win(logits: Float32s, uniform: Float64s, count: int) -> npt.NDArray[np.int64]:
    """Indices of the tokens that can be among the first `count`, and of few others.

    u <= noise <= u / (1 - u), so a token's time in the race, noise / exp(logit), lies between two bounds.
    """
    if len(logits) <= count:
        return np.arange(len(logits))
    with np.errstate(over="ignore"):
        earliest = uniform * np.exp(-logits)
        bounds = earliest / (1.0 - uniform)
    latest = bounds.min() if count == 1 else np.partition(bounds, count - 1)[count - 1]
    found: npt.NDArray[np.int64] = (earliest <= latest * (1.0 + MARGIN)).nonzero()[0]
    return found


def first_of_weights(weights: Float64s, *, key: int) -> int:
    """The token that wins with chances in proportion to `weights` [vocab_size], where the least noise / weight wins.

    A token without weight never does, unless all are.
    """
    uniform = uniform_row(key, len(weights))
    with np.errstate(over="ignore", divide="ignore"):
        latest = (uniform / (1.0 - uniform) / weights).min()
        may_win = (uniform / weights <= latest * (1.0 + MARGIN)).nonzero()[0]
        times = exponential(uniform[may_win]) / weights[may_win]
    return int(may_win[times.argmin()])
