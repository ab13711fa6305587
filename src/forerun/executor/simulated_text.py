"""What a simulated target writes, and how well it is drafted: from hashes and rates, or from recorded texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from forerun.core.random_bits import GAMMA, MASK, UNIT, mix, mix_all
from forerun.core.step import SequenceSpec

MANY = 12
"""Tokens from which on numpy is quicker than a loop."""


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
        seed, size = spec.seed, self.vocab_size
        if end - start >= MANY:
            bits = np.arange(start, end, dtype=np.uint64) * np.uint64(GAMMA) + np.uint64(seed & MASK)
            found: list[int] = (mix_all(bits) % np.uint64(size)).tolist()
            return found
        return [mix((seed + place * GAMMA) & MASK) % size for place in range(start, end)]


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


NO_SHAPE = DraftShape(0)


class Drafting(Protocol):
    """What a simulated drafter drafts, and how much of it the target would write too."""

    def draft(
        self, spec: SequenceSpec, position: int, *, limit: int, depth: int, min_survival: float
    ) -> tuple[DraftShape, tuple[int, ...]]:
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
        key, last = spec.seed * GAMMA, len(self.rates) - 1
        for depth in range(limit):
            drawn = (mix(key ^ (position << 16) ^ (depth + 1)) >> 12) * UNIT
            if drawn >= self.rates[min(depth, last)]:
                return depth
        return limit

    def draft(
        self,
        spec: SequenceSpec,
        position: int,
        *,
        limit: int,  # noqa: ARG002 - a chain has as many nodes as levels
        depth: int,
        min_survival: float,  # noqa: ARG002 - its chances are not known to the drafter
    ) -> tuple[DraftShape, tuple[int, ...]]:
        """See `Drafting`."""
        num_right = self.num_right(spec, position, depth)
        return DraftShape(self._length(spec, position, num_right, depth)), tuple(range(num_right))

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
