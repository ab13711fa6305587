"""Random numbers as a pure function of (seed, position, stream, index): no generator, no state.

A counter-based generator: the key of a draw is hashed from its coordinates, and what it gives is the
SplitMix64 sequence of that key (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014). So a draw depends neither on the batch nor on what was drawn before. A row of
noise, one number for each token of a vocabulary, is one such sequence: token t has its element t.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from forerun.core.exact_math import Float64s, log

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15  # SplitMix64's increment: 2**64 / golden ratio, made odd
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
UNIT = 2.0**-52  # 52 bits, so that (bits + 0.5) * UNIT is exact and never 0 or 1


class Stream(IntEnum):
    """What noise is for; two uses of the same place in a text must not share a stream.

    A draw must never decide twice: whoever judges or draws a draft that may be thrown away keys its
    noise by the position of the draft's first token, which grows with every step, and by the node.
    """

    TARGET = 1  # the target's own token at a position, whatever was drafted
    ACCEPTANCE = 2  # whether a drafted token is accepted
    RECOVERY = 3  # the token drawn from what the rejected drafts leave of the target
    DRAFT = 4  # the tokens that a drafter draws
    CHILD = 5  # seeds of the completions of one request


def uniform(seed: int, position: int, stream: Stream, *, index: int = 0) -> float:
    """One number uniform in (0, 1); `index` tells apart several draws at one position."""
    return ((mix(key_of(seed, position, stream, index) + GAMMA) >> 12) + 0.5) * UNIT


def uniform_row(key: int, vocab_size: int) -> Float64s:
    """The numbers uniform in (0, 1) of every token of the row with this key (see `key_of`): [vocab_size]."""
    return _uniforms(key, np.arange(vocab_size, dtype=np.uint64))


def uniforms(key: int, token_ids: npt.NDArray[np.integer]) -> Float64s:
    """Those of some tokens, the same as in `uniform_row`, at the cost of these few: [n]."""
    return _uniforms(key, token_ids.astype(np.uint64))


def exponential(uniform: Float64s) -> Float64s:
    """Exponential(1) noise from numbers uniform in (0, 1), -log(1 - u); never below u, and the smallest as precise as any."""
    # exact: u has 53 bits behind the point, and so has 1 - u
    return -log(1.0 - uniform)


def child_seed(seed: int, index: int) -> int:
    """The seed of completion `index` of a request; from 0 to 2**63 - 1."""
    return key_of(seed, 0, Stream.CHILD, index) >> 1


def key_of(*coordinates: int) -> int:
    """The 64 bits that some coordinates hash to."""
    key = 0
    for value in coordinates:
        key = mix(key + GAMMA * (value + 1))
    return key


def mix(bits: int) -> int:
    """SplitMix64's finaliser on one integer."""
    bits &= MASK
    bits = ((bits ^ (bits >> 30)) * MIX_1) & MASK
    bits = ((bits ^ (bits >> 27)) * MIX_2) & MASK
    return bits ^ (bits >> 31)


def mix_all(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`mix` on each element of an array, in place; the array."""
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        bits ^= bits >> np.uint64(shift)
        bits *= np.uint64(factor)
    bits ^= bits >> np.uint64(31)
    return bits


def _uniforms(key: int, counters: npt.NDArray[np.uint64]) -> Float64s:
    """`counters` is overwritten."""
    bits = counters
    bits += np.uint64(1)
    bits *= np.uint64(GAMMA)
    bits += np.uint64(key)
    mix_all(bits)
    bits >>= np.uint64(12)
    unit = bits.astype(np.float64)
    unit += 0.5
    unit *= UNIT
    return unit
