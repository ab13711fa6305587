"""What a simulated target writes, and how well it is drafted: from hashes and rates, or from recorded texts."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from forerun.core.random_bits import GAMMA, MASK, UNIT, mix, mix_all
from forerun.core.step import SequenceSpec

DRAWN_TOGETHER = 64
"""Places of a text whose tokens, or whose acceptance, are drawn at once."""


class Texts(Protocol):
    """What the target writes: a text is a function of its request alone."""

    def tokens(self, spec: SequenceSpec, start: int, end: int) -> list[int]:
        """The tokens at places [start, end) of a text; the prompt has the places before its length."""
        ...


@dataclass(frozen=True, slots=True)
class HashedTexts:
    """Texts that depend on the sequence's seed and the place alone."""

    vocab_size: int

    def tokens(self, spec: SequenceSpec, start: int, end: int) -> list[int]:
        """See `Texts`."""
        found: list[int] = []
        for first in range(start - start % DRAWN_TOGETHER, end, DRAWN_TOGETHER):
            tokens = _hashed(self.vocab_size, spec.seed, first)
            found += tokens[max(0, start - first) : end - first]
        return found


class RecordedText(NamedTuple):
    """A text that a target wrote."""

    num_prompt_tokens: int
    answer_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class RecordedTexts:
    """Texts that a target wrote, by the seed that their requests are sent with; other requests get hashed ones."""

    by_seed: Mapping[int | None, RecordedText]
    others: HashedTexts

    def tokens(self, spec: SequenceSpec, start: int, end: int) -> list[int]:
        """See `Texts`; after the recording's end a hashed text goes on."""
        text = self.by_seed.get(spec.sampling.seed)
        if text is None:
            return self.others.tokens(spec, start, end)
        num_prompt = text.num_prompt_tokens
        found = list(text.answer_ids[start - num_prompt : end - num_prompt])
        if len(found) < end - start:
            found += self.others.tokens(spec, start + len(found), end)
        return found


class DraftShape(NamedTuple):
    """A draft without its tokens: see `Draft`."""

    num_nodes: int
    parents: tuple[int, ...] | None = None  # None: a chain
    survival: tuple[float, ...] | None = None
    source: str | None = None


class Drafted(NamedTuple):
    """A draft, and its nodes on the text's path, from the root down: those that the target would write too."""

    shape: DraftShape
    right: tuple[int, ...]


NOTHING_DRAFTED = Drafted(DraftShape(0), ())


class Drafting(Protocol):
    """What a simulated drafter drafts, and how much of it the target would write too."""

    def draft(self, spec: SequenceSpec, position: int, *, limit: int, depth: int, min_survival: float) -> Drafted:
        """A draft whose first token is at place `position` of the text, and its nodes on the text's path.

        Args:
            spec: the sequence.
            position: the place, prompt included.
            limit: the most nodes.
            depth: the greatest depth of a node that can be used.
            min_survival: nodes that stand with less chance need not be drafted.
        """
        ...


@dataclass(frozen=True, slots=True)
class ConditionalAcceptance:
    """The rate at which a draft's token at each depth is right, given that those before it are.

    Drafts are chains. Beyond the last rate it stays the same. `proposed` is the share of drafts that have a
    token at each depth, and those without one count as wrong there; empty: all drafts are as long as they may be.
    A draw depends on the sequence's seed and the position alone.
    """

    rates: tuple[float, ...]
    proposed: tuple[float, ...] = ()

    def num_right(self, spec: SequenceSpec, position: int, limit: int) -> int:
        """How many tokens of a draft of `limit`, the first of them at `position` of the text, the target would write too."""
        first = position - position % DRAWN_TOGETHER
        return _num_right(self.rates, spec.seed, first, limit)[position - first]

    def draft(
        self,
        spec: SequenceSpec,
        position: int,
        *,
        limit: int,
        depth: int,
        min_survival: float,  # noqa: ARG002 - its chances are not known to the drafter
    ) -> Drafted:
        """See `Drafting`."""
        num_right = min(self.num_right(spec, position, limit), depth)
        return _chain(self._length(spec, position, num_right, depth), num_right)

    def _length(self, spec: SequenceSpec, position: int, num_right: int, depth: int) -> int:
        """How long a draft is of which so many tokens are right.

        Right tokens were drafted, and so the others are by so much more seldom that `proposed` holds for all drafts.
        """
        if not self.proposed:
            return depth
        drawn = (mix(spec.seed * GAMMA ^ (position << 16)) >> 12) * UNIT
        length, stands = 0, 1.0  # the chance that so many tokens are right
        for share, rate in zip(self.proposed[:depth], self.rates, strict=False):
            stands *= rate
            if length >= num_right and drawn * (1.0 - stands) >= share - stands:
                break
            length += 1
        return max(length, num_right)


@functools.lru_cache(maxsize=4096)
def _hashed(vocab_size: int, seed: int, first: int) -> list[int]:
    """The tokens at `DRAWN_TOGETHER` places of a text from `first` on."""
    places = np.arange(first, first + DRAWN_TOGETHER, dtype=np.uint64)
    bits = mix_all(places * np.uint64(GAMMA) + np.uint64(seed & MASK))
    found: list[int] = (bits % np.uint64(vocab_size)).tolist()
    return found


@functools.lru_cache(maxsize=1024)
def _chain(length: int, num_right: int) -> Drafted:
    return Drafted(DraftShape(length), tuple(range(num_right)))


@functools.lru_cache(maxsize=4096)
def _num_right(rates: tuple[float, ...], seed: int, first: int, limit: int) -> list[int]:
    """How many tokens of drafts of `limit` are right, at each of the `DRAWN_TOGETHER` places of a text from `first` on."""
    places = np.arange(first, first + DRAWN_TOGETHER, dtype=np.uint64) << np.uint64(16)
    depths = np.arange(1, limit + 1, dtype=np.uint64)
    bits = mix_all((places ^ np.uint64(seed * GAMMA & MASK))[:, None] ^ depths)
    drawn = (bits >> np.uint64(12)) * UNIT
    is_right = drawn < np.array([*rates, *[rates[-1]] * (limit - len(rates))][:limit])
    found: list[int] = np.logical_and.accumulate(is_right, axis=1).sum(axis=1).tolist()
    return found
