"""What a control's choices were worth: against plain decoding, and in hindsight against fixed draft lengths in the same steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from operator import mul, sub
from typing import TypeVar

STATIC_LENGTHS = (0, 1, 2, 3, 5, 8, 12, 16)
"""The fixed draft lengths that the choice is compared with."""

NUM_COMPARED = STATIC_LENGTHS[-1] + 1
"""The nodes of a draft that are told apart: the last one stands for all behind the longest fixed length."""

Number = TypeVar("Number", int, float)

BELIEVED = 8.0
"""Tokens that are taken to have stood as promised, before any is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationReport:
    """What a control's choices were worth, by the costs that it has fitted.

    `plain_tokens_per_second` is what plain decoding would have reached in the same steps. `regret` is
    how much faster (0: not at all) the best fixed draft length would have been, `best_static_length`.
    """

    tokens_per_second: float
    plain_tokens_per_second: float
    best_static_length: int
    regret: float


@dataclass(slots=True)
class _Promised:
    """What drafts were expected to bring in the steps that are compared: by the number of a node in its draft, and their cost."""

    tokens: list[float] = field(default_factory=lambda: [0.0] * NUM_COMPARED)
    cost: float = 0.0

    def add(self, tokens: Sequence[float], *, cost: float) -> None:
        """Count a step, by the tokens that the nodes of each number were expected to bring together."""
        self.cost += cost
        for node, of_node in enumerate(tokens):
            self.tokens[node] += of_node

    def since(self, earlier: _Promised) -> _Promised:
        """What was counted after `earlier`."""
        return _Promised(_differences(self.tokens, earlier.tokens), self.cost - earlier.cost)

    def rate(self, num_sequences: float, came_true: Sequence[float]) -> float:
        """Tokens for the cost, where so much of what is promised comes true."""
        tokens: float = num_sequences + sum(map(mul, self.tokens, came_true))
        return tokens / self.cost


@dataclass(slots=True)
class ChoiceAccount:
    """What was chosen, against fixed lengths in the same steps, and what became of the nodes that were verified."""

    num_sequences: float = 0.0  # of the steps that are compared
    chosen: _Promised = field(default_factory=_Promised)
    static: list[_Promised] = field(default_factory=lambda: [_Promised() for _ in STATIC_LENGTHS])
    expected: list[float] = field(default_factory=lambda: [0.0] * NUM_COMPARED)  # tokens, by the number of a node
    stood: list[int] = field(default_factory=lambda: [0] * NUM_COMPARED)
    tokens: float = 0.0
    seconds: float = 0.0
    plain_seconds: float = 0.0  # that plain decoding would have needed for the same tokens

    def note_step(self, num_tokens: int, seconds: float, *, plain: float) -> None:
        """Count the tokens of a step, the seconds that it took, and those that a token takes in a plain step."""
        self.tokens += num_tokens
        self.seconds += seconds
        self.plain_seconds += num_tokens * plain

    def note_fate(self, survival: Sequence[float], stood: Sequence[int]) -> None:
        """Count the nodes of a verified draft by their chances, and those that stood."""
        for node, chance in enumerate(survival):
            self.expected[min(node, NUM_COMPARED - 1)] += chance
        for node in stood:
            self.stood[min(node, NUM_COMPARED - 1)] += 1

    def note_choice(
        self,
        chances: Sequence[Sequence[float]],
        lengths: Sequence[int],
        *,
        cost_with: Callable[[int], float],
        drafting: float,
    ) -> None:
        """Count what was chosen in a step, and what fixed lengths would have chosen.

        Args:
            chances: of each sequence's drafted nodes.
            lengths: how many of them are verified.
            cost_with: the cost of the step with so many drafted nodes in all, drafting left out.
            drafting: its cost.
        """
        self.num_sequences += len(chances)
        verified = [one[:length] for one, length in zip(chances, lengths, strict=True)]
        self.chosen.add(_by_node(verified), cost=cost_with(sum(lengths)) + drafting)
        by_node, sizes = _by_node(chances), list(map(len, chances))
        for promised, length in zip(self.static, STATIC_LENGTHS, strict=True):
            num_drafted = sum([min(size, length) for size in sizes])
            promised.add(by_node[:length], cost=cost_with(num_drafted) + (drafting if length else 0.0))

    def copy(self) -> ChoiceAccount:
        """The account as it is now."""
        return deepcopy(self)

    def since(self, earlier: ChoiceAccount | None) -> ChoiceAccount:
        """What was counted after `earlier`; None: from the beginning."""
        if earlier is None:
            return self
        return ChoiceAccount(
            num_sequences=self.num_sequences - earlier.num_sequences,
            chosen=self.chosen.since(earlier.chosen),
            static=[now.since(then) for now, then in zip(self.static, earlier.static, strict=True)],
            expected=_differences(self.expected, earlier.expected),
            stood=_differences(self.stood, earlier.stood),
            tokens=self.tokens - earlier.tokens,
            seconds=self.seconds - earlier.seconds,
            plain_seconds=self.plain_seconds - earlier.plain_seconds,
        )

    def report(self) -> SpeculationReport | None:
        """What the choices were worth; None before the costs are known.

        Fixed lengths are judged in hindsight: by what became of verified nodes with the same number in their drafts.
        """
        if not self.seconds or not self.chosen.cost:
            return None
        came_true = self._came_true()
        rates = [promised.rate(self.num_sequences, came_true) for promised in self.static]
        best = max(range(len(rates)), key=rates.__getitem__)
        return SpeculationReport(
            tokens_per_second=self.tokens / self.seconds,
            plain_tokens_per_second=self.tokens / self.plain_seconds,
            best_static_length=STATIC_LENGTHS[best],
            regret=max(0.0, rates[best] / self.chosen.rate(self.num_sequences, came_true) - 1.0),
        )

    def _came_true(self) -> list[float]:
        """By the number of a node: what of the promised tokens stood; about 1 where few were verified."""
        pairs = zip(self.stood, self.expected, strict=True)
        return [(stood + BELIEVED) / (expected + BELIEVED) for stood, expected in pairs]


def _differences(now: Sequence[Number], then: Sequence[Number]) -> list[Number]:
    return list(map(sub, now, then))


def _by_node(drafts: Sequence[Sequence[float]]) -> list[float]:
    """The chances of drafts' nodes, summed over those with the same number; late ones count together."""
    sums = [0.0] * NUM_COMPARED
    for chances in drafts:
        for node, chance in enumerate(chances[: NUM_COMPARED - 1]):
            sums[node] += chance
        sums[-1] += sum(chances[NUM_COMPARED - 1 :])
    return sums
