"""How often a guess of each class is right, counted on the committed text.

A guess is told apart by what can be seen before it is verified: a copy by its source, by the length of its match
and by whether the recycle table says the same; a candidate of the table by the length of its context, by its share of the
probability that is left, and by what was guessed before it; a computed token by its depth in its draft, by its margin (see
`drafters.margins`), and by what copies and the table say of it; a runner-up of one by these two, its rank and what the
table says.
"""

from __future__ import annotations

from bisect import bisect
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.drafters.confidence import discount
from forerun.drafters.lookup.text_index import LONGEST_MATCH
from forerun.drafters.margins import NUM_MARGIN_CLASSES, PRIOR_CHANCES
from forerun.drafters.recycle_table import GAP_WEIGHTS
from forerun.ops.native.structs import MOST_RUNNERS_UP

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 13, 17, 25, 33)
"""The least match length (tokens) of each bucket."""

BUCKET_OF_LENGTH = [max(bisect(LENGTHS, length) - 1, 0) for length in range(LONGEST_MATCH + 1)]

SAME, AMONG, OTHER, NONE = range(4)
"""What the recycle table says of a copied token: its first candidate, another one, none of them, or nothing."""

NO_GUESS, AFTER_COPY, AFTER_COMPUTED = range(3)
"""What was guessed before a candidate: nothing, copies, or a computed token and perhaps copies."""

COPIED, COPIED_OTHER, NOT_COPIED = range(3)
"""What copies say of a computed token: the same, others, or nothing."""

RUNNER_UP_PRIOR = 0.2

NUM_DEPTH_CLASSES = 3  # of computed tokens
NUM_SHARES = 10  # classes of a candidate's share of the probability that is left
COPY_PRIORS = (1.0, 0.7)  # by source: how much of `1 - discount` a copy is worth at first
CANDIDATE_PRIORS = {1: 0.6, 2: 0.9}  # by context length: how much of its probability a candidate is worth at first

NUM_COPY_CLASSES = 2 * len(LENGTHS) * 4 * 2
NUM_LOOK_UP_CLASSES = NUM_COPY_CLASSES + 2 * NUM_SHARES * 3
FIRST_RUNNER_UP = NUM_LOOK_UP_CLASSES + NUM_DEPTH_CLASSES * NUM_MARGIN_CLASSES * 3 * 4
NUM_CLASSES = FIRST_RUNNER_UP + NUM_DEPTH_CLASSES * NUM_MARGIN_CLASSES * MOST_RUNNERS_UP * 4

PRIOR_WEIGHT = 4.0  # guesses that the prior counts as
DECAY = 0.999  # of what was counted, per guess of the class

HITS, TRIALS, PRIOR, RATE = range(4)


def copy_class(source: int, match_length: int, agreement: int, *, after_computed: bool) -> int:
    """The class of a copied token from source 0 (the own text) or 1 (past answers)."""
    return ((source * len(LENGTHS) + BUCKET_OF_LENGTH[match_length]) * 4 + agreement) * 2 + after_computed


def candidate_class(context_length: int, share: float, *, after: int) -> int:
    """The class of a candidate of the recycle table; `share` (0 to 1) is of the probability that is left."""
    decile = min(NUM_SHARES - 1, int(share * NUM_SHARES))
    return NUM_COPY_CLASSES + ((context_length - 1) * NUM_SHARES + decile) * 3 + after


def computed_class(depth: int, margin_class: int, copied: int, agreement: int) -> int:
    """The class of a computed token, `depth` (from 0) tokens behind what it was computed for."""
    return NUM_LOOK_UP_CLASSES + (_depth_and_margin(depth, margin_class) * 3 + copied) * 4 + agreement


def runner_up_class(depth: int, margin_class: int, rank: int, agreement: int) -> int:
    """The class of a runner-up, `rank` (from 0) behind the computed token at `depth`, whose margin it is."""
    return FIRST_RUNNER_UP + (_depth_and_margin(depth, margin_class) * MOST_RUNNERS_UP + rank) * 4 + agreement


def _depth_and_margin(depth: int, margin_class: int) -> int:
    return min(depth, NUM_DEPTH_CLASSES - 1) * NUM_MARGIN_CLASSES + margin_class


class HitRates:
    """Discounted counts of guesses and hits: `counts` is [NUM_CLASSES, 4] float64, a row per class.

    A row holds hits, trials, the prior, and the rate (hits + 4 * prior) / (trials + 4). `gap_weights` are the
    recycle table's, for those who read its arrays.
    """

    def __init__(self) -> None:
        self.gap_weights = np.array(GAP_WEIGHTS)
        self.counts: npt.NDArray[np.float64] = np.zeros((NUM_CLASSES, 4))
        for source, worth in enumerate(COPY_PRIORS):
            for length in LENGTHS:
                for agreement, after_computed in product(range(4), (False, True)):
                    guess_class = copy_class(source, length, agreement, after_computed=after_computed)
                    self._set_prior(guess_class, (1.0 - discount(length)) * worth)
        for context_length, worth in CANDIDATE_PRIORS.items():
            for decile in range(NUM_SHARES):
                for after in (NO_GUESS, AFTER_COPY, AFTER_COMPUTED):
                    share = (decile + 0.5) / NUM_SHARES
                    self._set_prior(candidate_class(context_length, share, after=after), share * worth)
        for depth, (margin_class, chance) in product(range(NUM_DEPTH_CLASSES), enumerate(PRIOR_CHANCES)):
            for copied, agreement in product(range(3), range(4)):
                self._set_prior(computed_class(depth, margin_class, copied, agreement), chance)
            for rank, agreement in product(range(MOST_RUNNERS_UP), range(4)):
                self._set_prior(runner_up_class(depth, margin_class, rank, agreement), RUNNER_UP_PRIOR)
        self._counts: Any = self.counts.data  # reads single numbers faster than the array

    def _set_prior(self, guess_class: int, prior: float) -> None:
        self.counts[guess_class] = 0.0, 0.0, prior, prior

    def rate(self, guess_class: int) -> float:
        """The chance that a guess of the class is right, given that those before it are wrong."""
        rate: float = self._counts[guess_class, RATE]
        return rate

    def count(self, guess_class: int, *, is_hit: bool) -> None:
        """Count a guess."""
        counts = self._counts
        hits = counts[guess_class, HITS] * DECAY + is_hit
        trials = counts[guess_class, TRIALS] * DECAY + 1.0
        counts[guess_class, HITS], counts[guess_class, TRIALS] = hits, trials
        counts[guess_class, RATE] = (hits + PRIOR_WEIGHT * counts[guess_class, PRIOR]) / (trials + PRIOR_WEIGHT)
