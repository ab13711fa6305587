"""Random numbers as a pure function of (seed, position, stream, index): no generator, no state.

A counter-based generator: the key of a draw is hashed from its coordinates, and what it gives is the
SplitMix64 sequence of that key (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014). So a draw depends neither on the batch nor on what was drawn before.
"""

from __future__ import annotations

from enum import IntEnum

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
