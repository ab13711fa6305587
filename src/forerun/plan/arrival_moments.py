"""The circumstances in which requests arrive: equally likely moments that stand for all, and how many others arrive with them."""

from __future__ import annotations

import functools
import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.plan.latencies import Counts
from forerun.plan.lengths import NUM_LENGTHS

Floats = npt.NDArray[np.float64]

NUM_MOMENTS = NUM_LENGTHS  # equally likely circumstances of an arrival that stand for all
MEAN_STEP = 0.05  # of a table of Poisson distributions
LARGE_COUNT = 8  # from which on a Poisson distribution is near a normal one


class Moments(NamedTuple):
    """Equally likely circumstances in which a request arrives; each field is evenly spread and independent."""

    left: Floats  # share of the running step that is still to go
    normal: Floats  # how long that step is, in deviations
    busy: Floats  # below the chance that the engine is busy: it is
    length: Counts  # the number of the prompt's length
    others: Floats  # how many others arrive in that step, as a share of the distribution
    others_normal: Floats  # the same in deviations


@functools.cache
def moments() -> Moments:
    """Those of all predictions."""
    # a Latin hypercube: each circumstance takes each of its values once, in an order of its own
    values = (np.arange(NUM_MOMENTS) + 0.5) / NUM_MOMENTS
    random = np.random.default_rng(0)
    left, step, busy, length, others = (random.permutation(NUM_MOMENTS) for _ in range(5))
    normal = np.array([NormalDist().inv_cdf(share) for share in values])
    return Moments(values[left], normal[step], values[busy], length, values[others], normal[others])


def poisson(mean: Floats) -> Floats:
    """Counts of which the mean is given, one at each moment, [rates, moments]; normal where the mean is large."""
    table = _poisson_quantiles()
    at = np.minimum(mean, LARGE_COUNT) / MEAN_STEP
    low = at.astype(np.int64)
    columns = np.arange(mean.shape[1])
    counts = table[low, columns] * (1.0 - at + low) + table[low + 1, columns] * (at - low)
    return np.where(mean > LARGE_COUNT, np.maximum(0.0, mean + moments().others_normal * np.sqrt(mean)), counts)


@functools.cache
def _poisson_quantiles() -> Floats:
    """Quantiles at the moments' shares of Poisson distributions whose means are multiples of `MEAN_STEP`."""
    shares = moments().others
    means = np.arange(0.0, LARGE_COUNT + 2 * MEAN_STEP, MEAN_STEP)[:, None]
    counts = np.zeros((len(means), len(shares)))
    term = np.exp(-means)
    below = term.copy()
    for number in range(1, 4 * LARGE_COUNT):
        counts += below < shares
        term = term * means / number
        below = below + term
    return counts


def soon_after(arrival_cv2: Floats, expected: Floats) -> Floats:
    """The chance that a gamma-distributed time between arrivals is below `expected` of its means, to first order."""
    shape = 1.0 / np.maximum(arrival_cv2, 1e-2)
    chance: Floats = np.minimum(1.0, np.minimum(1.0, shape * expected) ** shape / _gamma(1.0 + shape))
    return np.where(shape * expected >= 1.0, 1.0, chance)


_gamma = np.vectorize(math.gamma, otypes=[np.float64])
