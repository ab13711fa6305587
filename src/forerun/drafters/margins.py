"""How sure a drafter is of a token, by its margin over the first runner-up, and how often such tokens stand.

Of tokens that are taken as the likeliest the margin is between logits, of tokens that win the target's race between scores.
It says far more than a token's depth: of those of the shipped head that follow a token that stands, two of ten stand with
a margin below a quarter, and nearly all with one above 4.5.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect
from typing import NamedTuple

MARGIN_LIMITS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.5)
"""Where one class of margins ends and the next begins."""

UNKNOWN = len(MARGIN_LIMITS) + 1
"""The class of a token whose margin is not known."""

NUM_MARGIN_CLASSES = UNKNOWN + 1

PRIOR_CHANCES = (0.2, 0.25, 0.33, 0.45, 0.6, 0.7, 0.8, 0.95, 0.5)
"""The chance that a token of each class stands behind one that does, before anything is known of the drafter: about that of the
shipped head's tokens, greedily and at temperature 1."""

PRIOR_WEIGHT = 8.0  # tokens that a prior chance counts as
DISCOUNT = 0.998  # of what was counted in a class, per token of it


def margin_class(margin: float) -> int:
    """The class of a margin; NaN is not known."""
    return UNKNOWN if math.isnan(margin) else bisect(MARGIN_LIMITS, margin)


class EarlyStop(NamedTuple):
    """Where a chain ends: behind a token by which its chance to stand falls below `least_chance`.

    The chance of a chain is the product of its tokens', which `chances` has for each class of margins but `UNKNOWN`; a token
    whose margin is not known ends no chain.
    """

    least_chance: float
    chances: array[float]

    def chance_of(self, margin: float) -> float:
        """The chance of a token behind one that stands, as far as it may end a chain."""
        return 1.0 if math.isnan(margin) else self.chances[margin_class(margin)]


class ChancesOfMargins:
    """How often the tokens of one drafter stand behind one that does, by their margins."""

    def __init__(self) -> None:
        self.chances = array("d", PRIOR_CHANCES[:UNKNOWN])
        self._stood = [PRIOR_WEIGHT * chance for chance in PRIOR_CHANCES]
        self._counted = [PRIOR_WEIGHT] * NUM_MARGIN_CLASSES

    def observe(self, margin: float, *, stood: bool) -> None:
        """Count a token that followed one that stood."""
        one = margin_class(margin)
        self._stood[one] = self._stood[one] * DISCOUNT + stood
        self._counted[one] = self._counted[one] * DISCOUNT + 1.0
        if one != UNKNOWN:
            self.chances[one] = self._stood[one] / self._counted[one]

    def chance_of(self, margin: float) -> float:
        """The chance of a token behind one that stands."""
        one = margin_class(margin)
        return self._stood[one] / self._counted[one]

    @property
    def mean(self) -> float:
        """How often a token stands behind one that does, whatever its margin."""
        return sum(self._stood) / sum(self._counted)
