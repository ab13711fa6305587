"""Distributions of latencies, for several arrival rates at once: their means, quantiles, and the share within a limit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int64]

NUM_HALVINGS, NEGLIGIBLE = 50, 1e-9  # of the interval in which a quantile lies: how many at most, and its width at last


def normal_share(z: Floats) -> Floats:
    """The share of a standard normal distribution below each value."""
    halves: Floats = 0.5 * _erfc(-z / math.sqrt(2.0))
    return halves


_erfc = np.vectorize(math.erfc, otypes=[np.float64])


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Latencies above 0 of a mean and a squared coefficient of variation each, [rates]; mean 0: none at all."""

    mean: Floats
    cv2: Floats

    def share_within(self, limit: float) -> Floats:
        """The share of requests whose latency is at most `limit` seconds, by rate."""
        is_real = (self.mean > 0.0) & np.isfinite(self.mean)
        mean = np.where(is_real, self.mean, 1.0)
        deviation = np.sqrt(np.log1p(np.maximum(self.cv2, 1e-12)))
        share = normal_share((np.log(limit / mean) + deviation**2 / 2.0) / deviation)
        return np.where(is_real, share, np.where(self.mean > 0.0, 0.0, 1.0))

    def quantile(self, share: float) -> Floats:
        """The latency that a share of the requests does not exceed, by rate."""
        variance = np.log1p(np.maximum(self.cv2, 1e-12))
        quantile: Floats = self.mean * np.exp(NormalDist().inv_cdf(share) * np.sqrt(variance) - variance / 2.0)
        return quantile

    @property
    def variance(self) -> Floats:
        """Its variance, in seconds squared."""
        variance: Floats = self.cv2 * self.mean**2
        return variance

    def at(self, rates: Counts) -> Lognormal:
        """The same for some of the rates, by their numbers."""
        return Lognormal(self.mean[rates], self.cv2[rates])


@dataclass(frozen=True, slots=True)
class WaitThenServed:
    """A wait, and a service after it: with chance `wait_chance` an exponential wait of mean `mean_wait_of_waiting`.

    `service` has equally likely seconds of service, [rates, points]; the waits are by rate.
    """

    service: Floats
    wait_chance: Floats
    mean_wait_of_waiting: Floats

    @property
    def mean(self) -> Floats:
        """Mean seconds, by rate."""
        mean: Floats = self.service.mean(axis=1) + self.wait_chance * self.mean_wait_of_waiting
        return mean

    @property
    def variance(self) -> Floats:
        """Its variance, in seconds squared."""
        # of a wait that is exponential with a chance c: 2 c mean² - (c mean)²
        spread = self.wait_chance * (2.0 - self.wait_chance) * self.mean_wait_of_waiting**2
        variance: Floats = self.service.var(axis=1) + spread
        return variance

    def share_within(self, limit: float | Floats) -> Floats:
        """The share of requests whose latency is at most `limit` seconds, by rate."""
        left = np.asarray(limit, dtype=np.float64).reshape(-1, 1) - self.service
        scale = np.maximum(self.mean_wait_of_waiting, 1e-12)[:, None]
        still_waiting = self.wait_chance[:, None] * np.exp(-np.maximum(left, 0.0) / scale)
        share: Floats = np.where(left >= 0.0, 1.0 - still_waiting, 0.0).mean(axis=1)
        return np.where(np.isfinite(self.mean_wait_of_waiting), share, 0.0)

    def quantile(self, share: float) -> Floats:
        """The latency that a share of the requests does not exceed, by rate; found by halving."""
        is_finite = np.isfinite(self.mean_wait_of_waiting)
        waits = np.where(is_finite, self.mean_wait_of_waiting, 0.0)
        low, high = np.zeros(len(waits)), self.service.max(axis=1) - waits * math.log(1.0 - share)
        for _ in range(NUM_HALVINGS):
            middle = (low + high) / 2.0
            is_enough = self.share_within(middle) >= share
            low, high = np.where(is_enough, low, middle), np.where(is_enough, middle, high)
            if (high - low <= NEGLIGIBLE * high).all():
                break
        return np.where(is_finite, high, np.inf)

    def at(self, rates: Counts) -> WaitThenServed:
        """The same for some of the rates, by their numbers."""
        return WaitThenServed(self.service[rates], self.wait_chance[rates], self.mean_wait_of_waiting[rates])
