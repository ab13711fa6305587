"""Waiting lines: Erlang's formula, Allen and Cunneen's correction, and a server whose speed depends on who is in it.

Sources: Erlang C and the Allen-Cunneen approximation as in Bolch et al., Queueing Networks and Markov Chains, 6.3;
the load-dependent queue is the birth-death chain of the same book, 3.1. Times in seconds, rates per second.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@functools.lru_cache(maxsize=4096)
def erlang_c(num_servers: int, offered: float) -> float:
    """The chance that an arrival of a Poisson process waits, as all servers are busy.

    Args:
        num_servers: at least 1.
        offered: arrivals per second times seconds of service, in servers; from `num_servers` on all wait: 1.
    """
    if offered >= num_servers:
        return 1.0
    blocked = 1.0  # Erlang B, by its recursion
    for servers in range(1, num_servers + 1):
        blocked = offered * blocked / (servers + offered * blocked)
    return blocked / (1.0 - offered / num_servers * (1.0 - blocked))


def variability(arrival_cv2: npt.ArrayLike, service_cv2: npt.ArrayLike) -> Floats:
    """Allen and Cunneen's factor of a mean wait: 1 for Poisson arrivals and exponential times of service.

    Both are squared coefficients of variation.
    """
    return (np.asarray(arrival_cv2, dtype=np.float64) + np.asarray(service_cv2, dtype=np.float64)) / 2.0


def mean_wait(
    rate: float, service_seconds: float, num_servers: int, *, arrival_cv2: float = 1.0, service_cv2: float = 1.0
) -> float:
    """Mean seconds that an arrival waits for one of several equal servers; infinite where they cannot keep up."""
    offered = rate * service_seconds
    if offered >= num_servers:
        return math.inf
    idle_rate = num_servers / service_seconds - rate
    return float(variability(arrival_cv2, service_cv2)) * erlang_c(num_servers, offered) / idle_rate


class Occupancy(NamedTuple):
    """How full a load-dependent server is, for several arrival rates; rows belong to rates.

    Where `is_stable` is False the line grows without end, and the other values are those of a full server.
    """

    is_stable: npt.NDArray[np.bool_]  # [rates]
    share: Floats  # [rates, places + 1], of the time that so many are served
    wait_chance: Floats  # [rates], that an arrival finds all places taken
    mean_wait: Floats  # [rates], seconds, of all arrivals

    @property
    def mean_served(self) -> Floats:
        """Mean number that are served at a time, by rate."""
        served: Floats = self.share @ np.arange(self.share.shape[1], dtype=np.float64)
        return served

    @property
    def seen_share(self) -> Floats:
        """The same shares as those who are served see them, [rates, places]: n of them see n, themselves included."""
        numbers = np.arange(1, self.share.shape[1], dtype=np.float64)
        weighted = self.share[:, 1:] * numbers
        total = weighted.sum(axis=1, keepdims=True)
        # where nothing arrives, an arrival would be alone
        alone = np.eye(1, len(numbers))
        return np.where(total > 0.0, weighted / np.where(total > 0.0, total, 1.0), alone)


def load_dependent(rates: Floats, departures: Floats) -> Occupancy:
    """The steady state of a birth-death chain whose speed depends on how many it serves; more than that wait in line.

    An engine is one: it serves all running sequences at once, each the slower the more there are. For servers
    that share their speed evenly this holds for any distribution of service (insensitivity); the line's length is
    that of exponential service.

    Args:
        rates: [rates], arrivals per second, each above 0.
        departures: [rates, places], those who leave per second while 1, 2, ... are served, above 0.
    """
    steps = np.log(rates)[:, None] - np.log(departures)
    logs = np.concatenate([np.zeros((len(rates), 1)), np.cumsum(steps, axis=1)], axis=1)
    weights = np.exp(logs - logs.max(axis=1, keepdims=True))
    ratio = rates / departures[:, -1]
    is_stable = ratio < 1.0
    safe = np.where(is_stable, ratio, 0.0)
    weights[:, -1] /= 1.0 - safe  # and all who wait
    share = weights / weights.sum(axis=1, keepdims=True)
    share[~is_stable] = np.eye(1, share.shape[1], share.shape[1] - 1)
    wait_chance = share[:, -1]
    wait = np.where(is_stable, wait_chance * safe / (1.0 - safe) / rates, np.inf)
    return Occupancy(is_stable, share, wait_chance, wait)
