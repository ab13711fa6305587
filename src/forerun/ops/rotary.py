"""Rotary position embedding (RoPE, arXiv 2104.09864) with its ways to stretch the context."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Position interpolation (arXiv 2306.15595): all frequencies divided by `factor`."""

    factor: float

    attention_factor = 1.0

    def stretch(self, inv_freq: Tensor) -> Tensor:
        """[dim / 2] -> [dim / 2]"""
        return inv_freq / self.factor


@dataclass(frozen=True, slots=True)
class FactorScaling:
    """Each frequency divided by a factor of its own, as GGUF files store Llama 3's scaling."""

    factors: tuple[float, ...]  # one for each frequency

    attention_factor = 1.0

    def stretch(self, inv_freq: Tensor) -> Tensor:
        """[dim / 2] -> [dim / 2]"""
        return inv_freq / torch.tensor(self.factors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's (arXiv 2407.21783): long wavelengths divided by `factor`, short ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_len: float  # tokens the model was pretrained on

    attention_factor = 1.0

    def stretch(self, inv_freq: Tensor) -> Tensor:
        """[dim / 2] -> [dim / 2]"""
        turns = self.original_max_len * inv_freq / (2 * math.pi)  # in the pretrained context
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = kept.clamp(0, 1)
        return inv_freq * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): frequencies ramp from kept to divided by `factor`, scores are sharpened.

    `attention_factor` multiplies cosine and sine. `truncate` rounds the ramp's ends to whole
    dimensions.
    """

    factor: float
    original_max_len: float
    theta: float
    attention_factor: float
    beta_fast: float = 32.0  # turns in the pretrained context above which a dimension is kept
    beta_slow: float = 1.0  # turns below which it is divided
    truncate: bool = True

    def stretch(self, inv_freq: Tensor) -> Tensor:
        """[dim / 2] -> [dim / 2]"""
        dim = 2 * len(inv_freq)
        low, high = self._dimension(self.beta_fast, dim), self._dimension(self.beta_slow, dim)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        index = torch.arange(len(inv_freq), dtype=inv_freq.dtype)
        divided = ((index - low) / (high - low if high != low else 0.001)).clamp(0, 1)
        return inv_freq * ((1 - divided) + divided / self.factor)

    def _dimension(self, turns: float, dim: int) -> float:
        """The (fractional) pair of dimensions that turns so many times in the pretrained context."""
        return dim * math.log(self.original_max_len / (turns * 2 * math.pi)) / (2 * math.log(self.theta))


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """LongRoPE (arXiv 2402.13753): each frequency divided by a factor of its own, another one where texts are longer than trained on.

    Keys stay in the cache as they were turned, so one of both sets is for all texts of an engine, and for all of their tokens.
    """

    short_factors: tuple[float, ...]  # one for each frequency, for texts of up to `original_max_len` tokens
    long_factors: tuple[float, ...]
    original_max_len: float
    attention_factor: float  # on cosine and sine, with both sets
    is_long: bool = False

    def stretch(self, inv_freq: Tensor) -> Tensor:
        """[dim / 2] -> [dim / 2]"""
        return inv_freq / torch.tensor(self.long_factors if self.is_long else self.short_factors)


def longrope_attention_factor(factor: float, original_max_len: float) -> float:
    """LongRoPE's factor on cosine and sine (arXiv 2404.14219, Phi-3) for a context that became `factor` times as long."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_max_len))


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """YaRN's recommended factor on cosine and sine (eq. 22; with DeepSeek's mscale where given)."""

    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)


RopeScaling = LinearScaling | FactorScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotation of the first `dim` dimensions of a head with base `theta`; without `scaling` the context is not stretched."""

    dim: int
    theta: float
    scaling: RopeScaling | None = None

    @property
    def longest_text(self) -> int | None:
        """Tokens of the longest text that LongRoPE's factors for short texts are for; None: any, as with all other ropes."""
        scaling = self.scaling
        return int(scaling.original_max_len) if isinstance(scaling, LongRopeScaling) and not scaling.is_long else None

    def for_texts_of(self, max_len: int | None) -> RopeConfig:
        """Return the rope for texts of up to `max_len` tokens (None: short ones): LongRoPE's with the factors for those."""
        if not isinstance(self.scaling, LongRopeScaling):
            return self
        is_long = max_len is not None and max_len > self.scaling.original_max_len
        return replace(self, scaling=replace(self.scaling, is_long=is_long))


class Rotation(NamedTuple):
    """Cosine and sine of each row's angles, [T, 1, dim / 2] each."""

    cos: Tensor
    sin: Tensor


class Rotary:
    """Turns positions into rotations, the same for all layers that share a `RopeConfig`."""

    def __init__(self, config: RopeConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        scaling = config.scaling
        self._attention_factor = 1.0 if scaling is None else scaling.attention_factor
        self._inv_freq = _inverse_frequencies(config, device)
        self.device = device
        self._dtype = dtype

    def rotation(self, positions: Tensor) -> Rotation:
        """Rotation of rows at `positions` [T]; angles in fp32 whatever the model's dtype."""
        angles = (positions[:, None] * self._inv_freq)[:, None]
        cos, sin = angles.cos(), angles.sin()
        if self._attention_factor != 1.0:
            cos, sin = cos * self._attention_factor, sin * self._attention_factor
        return Rotation(cos.to(self._dtype), sin.to(self._dtype))


@lru_cache(maxsize=64)
def _inverse_frequencies(config: RopeConfig, device: torch.device) -> Tensor:
    """[dim / 2] fp32: radians a place; sent to a device once, since a GPU is waited for while it takes them."""
    exponents = torch.arange(0, config.dim, 2, dtype=torch.float32, device="cpu") / config.dim
    frequencies = 1.0 / config.theta**exponents
    return (frequencies if config.scaling is None else config.scaling.stretch(frequencies)).to(device)


class RotaryTable:
    """A `Rotary` that looks its rotations up: a position's are always computed in the same call, to the same bits.

    It grows by whole chunks as later positions come; memory is taken only for those. Engines in several threads may share
    one: a table is never changed, only replaced by a longer one.
    """

    CHUNK = 1024

    def __init__(self, rotary: Rotary) -> None:
        self._rotary = rotary
        self._table: Rotation | None = None

    def rotation(self, positions: Tensor) -> Rotation:
        """Rotation of rows at `positions` [T] (int64, on the CPU)."""
        table = self.of_first(int(positions.numpy().max()) + 1 if len(positions) else 1)
        return Rotation(table.cos.index_select(0, positions), table.sin.index_select(0, positions))

    def of_first(self, num_positions: int) -> Rotation:
        """Rotations of so many positions from 0 on, or of more: the table itself, the same object until it is too short."""
        table = self._table
        if table is None or len(table.cos) < num_positions:
            table = self._table = self._grown(table, -(-num_positions // self.CHUNK))
        return table

    def _grown(self, table: Rotation | None, num_chunks: int) -> Rotation:
        first = 0 if table is None else len(table.cos)
        starts = range(first, num_chunks * self.CHUNK, self.CHUNK)
        added = [self._rotary.rotation(torch.arange(start, start + self.CHUNK)) for start in starts]
        known = [] if table is None else [table]
        return Rotation(*(torch.cat(parts) for parts in zip(*known, *added, strict=True)))


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate x [T, num_heads, head_dim]: dimension i pairs with i + dim / 2; those from `dim` on stay."""
    cos, sin = rotation
    half = cos.shape[-1]
    rest = x.shape[-1] - 2 * half
    if rest == 0:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    first, second, kept = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, kept), dim=-1)
