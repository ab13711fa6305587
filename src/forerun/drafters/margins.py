"""How sure a drafter is of a token: how far it is ahead of the next one, and how often such tokens stand.

Of tokens that are taken as the likeliest the margin is between logits, of tokens that win the target's race between scores.
It says far more than a token's depth: of tokens that stand behind one that does, two of ten do with a margin below a
quarter, and nearly all with one above 4.5.
"""

from __future__ import annotations

import math
from bisect import bisect

MARGIN_LIMITS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.5)
"""Where one class of margins ends and the next begins."""

UNKNOWN = len(MARGIN_LIMITS) + 1
"""The class of a token whose margin is not known."""

NUM_MARGIN_CLASSES = UNKNOWN + 1

CHANCES = (0.2, 0.25, 0.33, 0.45, 0.6, 0.7, 0.8, 0.95, 0.5)
"""The chance that a token of each class stands behind one that does: of the shipped head's drafts, rounded, as little
differs between greedy texts and those at temperature 1, and between depths."""


def margin_class(margin: float) -> int:
    """The class of a margin; NaN is not known."""
    return UNKNOWN if math.isnan(margin) else bisect(MARGIN_LIMITS, margin)


def chance_of_margin(margin: float) -> float:
    """The chance of a token behind one that stands; the twin of csrc/chain.h."""
    return CHANCES[margin_class(margin)]
