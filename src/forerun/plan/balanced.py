"""How full engines are behind a router that sends each request to the engine with the fewest.

The requests in the whole fleet number N X, where X has the mean of one engine's batch and a deviation that
shrinks with the number of engines N; each engine then has X, rounded up or down. Where one of them leaves, the
engine has the fewest, and the next arrival replaces it. So as long as X < 1 a request is alone in its engine, and
nobody's prompt stalls it: with random routing it would often meet others.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.plan.latencies import normal_share

Floats = npt.NDArray[np.float64]

NUM_LEVELS = 15  # equally likely values that stand for those of X
DEVIATIONS = np.array([NormalDist().inv_cdf((number + 0.5) / NUM_LEVELS) for number in range(NUM_LEVELS)])


class Balance(NamedTuple):
    """Shares at several arrival rates; the first dimension is that of the rates."""

    share: Floats  # [rates, places + 1], of an engine's time that it serves so many
    met_share: Floats  # [rates, places + 1], of arrivals that meet so many in their engine
    seen_share: Floats  # [rates, places], of requests' time that so many are served, themselves included
    company: Floats  # [rates], arrivals that a request meets in its engine, over those of random routing


def balance(mean_served: Floats, num_engines: Floats, peakedness: Floats, num_places: int) -> Balance:
    """Engines that serve `mean_served` each on average.

    Args:
        mean_served: [rates].
        num_engines: [rates].
        peakedness: [rates], variance over mean of the number in the fleet; 1 for Poisson arrivals that do not
            slow each other down.
        num_places: of an engine.
    """
    deviation = np.sqrt(mean_served * peakedness / num_engines)
    levels = np.clip(mean_served[:, None] + deviation[:, None] * DEVIATIONS, 1e-9, num_places)
    low = np.minimum(np.floor(levels).astype(np.int64), num_places - 1)
    high_share = levels - low
    share = np.zeros((len(mean_served), num_places + 1))
    rows = np.arange(len(mean_served))[:, None]
    np.add.at(share, (rows, low), (1.0 - high_share) / NUM_LEVELS)
    np.add.at(share, (rows, low + 1), high_share / NUM_LEVELS)
    numbers = np.arange(1, num_places + 1)
    served = share[:, 1:] * numbers
    seen = served / served.sum(axis=1, keepdims=True)
    # who leaves an engine is replaced by the next arrival, which meets those who stay
    met = np.concatenate([seen, np.zeros((len(seen), 1))], axis=1)
    company = np.minimum(1.0, (seen @ (numbers - 1.0)) / levels.mean(axis=1))
    # where two arrive at almost the same time, one of N engines may be the least busy for both
    return Balance(share, met, seen, company + (1.0 - company) / num_engines)


def pooled_wait(num_servers: Floats, utilization: Floats, drain: Floats) -> tuple[Floats, Floats]:
    """The chance that all of many servers are busy, and mean seconds of waiting (Halfin and Whitt 1981).

    Args:
        num_servers: [rates], places of all engines.
        utilization: [rates], below 1.
        drain: [rates], how many more could leave per second than arrive.
    """
    spare = (1.0 - utilization) * np.sqrt(num_servers)
    density = np.exp(-(spare**2) / 2.0) / np.sqrt(2.0 * np.pi)
    chance = 1.0 / (1.0 + spare * normal_share(spare) / np.maximum(density, 1e-300))
    return chance, chance / np.maximum(drain, 1e-300)
