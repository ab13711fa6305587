"""How long a load's prompts and answers are: gamma-distributed, as the simulator draws them."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from forerun.plan.load import Load

Floats = npt.NDArray[np.float64]

NUM_LENGTHS = 48  # equally likely ones that stand for all
DRAWN_PER_LENGTH = 400  # of which each is the mean
NEGLIGIBLE = 1e-6  # coefficient of variation
LEAST_SHAPE = 1e-4  # of a distribution, 1 / cv²: of a smaller one nothing may be drawn that is above 0
TWO_ROUNDED = 1.5  # tokens, from which on there is a second one


def prompt_lengths(load: Load) -> Floats:
    """Equally likely numbers of prompt tokens to compute, the least first: what is behind the beginning that all share, 1 at least."""
    cached = load.isl - load.computed_isl
    lengths: Floats = np.maximum(1.0, load.isl * _of_mean_one(load.isl_cv) - cached)
    return lengths


def tokens_after_first(load: Load) -> Floats:
    """Equally likely numbers of tokens after the first, the least first, of answers that have any."""
    lengths = load.osl * _of_mean_one(load.osl_cv)
    after: Floats = np.maximum(1.0, lengths[lengths >= min(TWO_ROUNDED, lengths[-1])] - 1.0)
    return after


@functools.lru_cache(maxsize=256)
def _of_mean_one(cv: float) -> Floats:
    """Lengths of mean 1 and a coefficient of variation."""
    if cv < NEGLIGIBLE:
        return np.ones(NUM_LENGTHS)
    drawn = np.random.default_rng(0).gamma(max(cv**-2, LEAST_SHAPE), size=NUM_LENGTHS * DRAWN_PER_LENGTH)
    lengths: Floats = np.sort(drawn).reshape(NUM_LENGTHS, DRAWN_PER_LENGTH).mean(axis=1)
    lengths /= lengths.mean()
    return lengths
