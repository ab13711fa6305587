"""Noise as a pure function of (seed, position, stream, index, token): no generator, no state.

A counter-based generator: the key of a draw is hashed from its coordinates, and the noise of token
t is element t of the SplitMix64 sequence of that key (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014). So noise depends neither on the batch nor on what was
drawn before, and a few tokens' noise costs only these few tokens.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15  # SplitMix64's increment: 2**64 / golden ratio, made odd
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_UNIT = 2.0**-52  # 52 bits, so that (bits + 0.5) * _UNIT is exact and never 0 or 1


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
    return ((_mix(_key(seed, position, stream, index) + _GAMMA) >> 12) + 0.5) * _UNIT


def exponential_row(
    seed: int,
    position: int,
    stream: Stream,
    *,
    vocab_size: int,
    index: int = 0,
    device: torch.device | None = None,
) -> Tensor:
    """Exponential(1) noise of every token: [vocab_size] fp32."""
    counters = np.arange(vocab_size, dtype=np.uint64)
    noise = torch.from_numpy(_exponential(_key(seed, position, stream, index), counters))
    return noise if device is None else noise.to(device)


def exponential(seed: int, position: int, stream: Stream, *, token_ids: Tensor, index: int = 0) -> Tensor:
    """Exponential(1) noise of some tokens, the same as theirs in `exponential_row`: [n] fp32."""
    counters = token_ids.detach().cpu().numpy().astype(np.uint64)
    return torch.from_numpy(_exponential(_key(seed, position, stream, index), counters)).to(token_ids.device)


def child_seed(seed: int, index: int) -> int:
    """The seed of completion `index` of a request; from 0 to 2**63 - 1."""
    return _key(seed, 0, Stream.CHILD, index) >> 1


def _key(*coordinates: int) -> int:
    key = 0
    for value in coordinates:
        key = _mix(key + _GAMMA * (value + 1))
    return key


def _mix(bits: int) -> int:
    """SplitMix64's finaliser on one integer."""
    bits &= _MASK
    bits = ((bits ^ (bits >> 30)) * _MIX_1) & _MASK
    bits = ((bits ^ (bits >> 27)) * _MIX_2) & _MASK
    return bits ^ (bits >> 31)


def _exponential(key: int, counters: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
    """Inverse-CDF exponential noise; `counters` is overwritten."""
    bits = counters
    bits += np.uint64(1)
    bits *= np.uint64(_GAMMA)
    bits += np.uint64(key)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        bits ^= bits >> np.uint64(shift)
        bits *= np.uint64(factor)
    bits ^= bits >> np.uint64(31)
    bits >>= np.uint64(12)
    unit = bits.astype(np.float64)
    unit += 0.5
    unit *= -_UNIT
    # log1p keeps the relative precision of small noise, and the smallest noise decides the argmax.
    noise: npt.NDArray[np.float64] = np.log1p(unit, out=unit)
    return np.negative(noise, out=noise).astype(np.float32)
