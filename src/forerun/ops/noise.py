"""Noise of a row of tokens, as a pure function of (seed, position, stream, index, token).

The noise of token t is element t of the SplitMix64 sequence whose key the other coordinates hash to
(`core.random_bits`). So a few tokens' noise costs only these few tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forerun.core.random_bits import GAMMA, MIX_1, MIX_2, UNIT, Stream, key_of


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
    noise = torch.from_numpy(_exponential(key_of(seed, position, stream, index), counters))
    return noise if device is None else noise.to(device)


def exponential(seed: int, position: int, stream: Stream, *, token_ids: Tensor, index: int = 0) -> Tensor:
    """Exponential(1) noise of some tokens, the same as theirs in `exponential_row`: [n] fp32."""
    counters = token_ids.detach().cpu().numpy().astype(np.uint64)
    return torch.from_numpy(_exponential(key_of(seed, position, stream, index), counters)).to(token_ids.device)


def _exponential(key: int, counters: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
    """Inverse-CDF exponential noise; `counters` is overwritten."""
    bits = counters
    bits += np.uint64(1)
    bits *= np.uint64(GAMMA)
    bits += np.uint64(key)
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        bits ^= bits >> np.uint64(shift)
        bits *= np.uint64(factor)
    bits ^= bits >> np.uint64(31)
    bits >>= np.uint64(12)
    unit = bits.astype(np.float64)
    unit += 0.5
    unit *= -UNIT
    # log1p keeps the relative precision of small noise, and the smallest noise decides the argmax.
    noise: npt.NDArray[np.float64] = np.log1p(unit, out=unit)
    return np.negative(noise, out=noise).astype(np.float32)
