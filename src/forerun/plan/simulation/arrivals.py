"""When requests arrive: steadily, in bursts, or over a day; evenly, at random, or in clumps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forerun.errors import ConfigError
from forerun.plan.lengths import NEGLIGIBLE
from forerun.plan.load import MOST_CV

Floats = npt.NDArray[np.float64]

SECONDS_OF_DAY = 86_400.0
STEPS_OF_DAY = 288  # in which the rate of a day's curve is constant


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalPattern:
    """A rate that goes through constant pieces and begins again, and how unevenly requests come at it.

    `durations` (s) and `rates` (requests per second) are those of the pieces. `cv` is the coefficient of
    variation of the times between arrivals, measured in mean times: 1 is a Poisson process, 0 a fixed beat, above 1 clumps.

    Raises:
        ConfigError: a number is out of range, or no piece has any request.
    """

    durations: tuple[float, ...]
    rates: tuple[float, ...]
    cv: float = 1.0

    def __post_init__(self) -> None:
        if len(self.durations) != len(self.rates) or not self.durations:
            raise ConfigError(
                f"arrivals: got {len(self.durations)} durations for {len(self.rates)} rates; one for each"
            )
        for name, values, can_be_zero in (("duration", self.durations, False), ("rate", self.rates, True)):
            for value in values:
                if not (0 < value < math.inf or (can_be_zero and value == 0)):
                    raise ConfigError(f"arrivals: got a {name} of {value:g}; must be a number above 0")
        if not any(self.rates):
            raise ConfigError("arrivals: all rates are 0; at least one must be above")
        if not 0 <= self.cv <= MOST_CV:
            raise ConfigError(f"arrivals: got cv={self.cv:g}; must be a number from 0 to {MOST_CV:g}")

    @property
    def requests_per_round(self) -> float:
        """Requests that are expected until the rate begins again."""
        return float(np.dot(self.durations, self.rates))

    @classmethod
    def steady(cls, rate: float, *, cv: float = 1.0) -> ArrivalPattern:
        """The same rate all the time."""
        return cls(durations=(1.0,), rates=(rate,), cv=cv)

    @classmethod
    def bursts(cls, rate: float, *, factor: float, every: float, length: float, cv: float = 1.0) -> ArrivalPattern:
        """`factor` times as many requests for `length` of each `every` seconds, at the end of them; `rate` is the mean.

        Raises:
            ConfigError: a burst is no shorter than the time from one to the next.
        """
        if not 0 < length < every:
            raise ConfigError(f"arrivals: got bursts of {length:g} s every {every:g} s; they must be shorter than that")
        calm = rate * every / (every - length + factor * length)
        return cls(durations=(every - length, length), rates=(calm, calm * factor), cv=cv)

    @classmethod
    def day(cls, rate: float, *, peak: float = 1.8, period: float = SECONDS_OF_DAY, cv: float = 1.0) -> ArrivalPattern:
        """A cosine from its lowest to its peak and back; `rate` is the mean, `peak` the highest rate over it (1 to 2).

        Raises:
            ConfigError: the peak is out of range.
        """
        if not 1 <= peak <= 2:
            raise ConfigError(
                f"arrivals: got a peak of {peak:g} times the mean; must be from 1 to 2, as no rate is below 0"
            )
        middles = (np.arange(STEPS_OF_DAY) + 0.5) / STEPS_OF_DAY
        rates = rate * (1 - (peak - 1) * np.cos(2 * np.pi * middles))
        return cls(durations=(period / STEPS_OF_DAY,) * STEPS_OF_DAY, rates=tuple(rates.tolist()), cv=cv)

    def times(self, count: int, random: np.random.Generator) -> Floats:
        """Arrival times of the first `count` requests, in seconds from the start."""
        gaps = np.ones(count) if self.cv < NEGLIGIBLE else random.gamma(self.cv**-2, self.cv**2, count)
        number = np.cumsum(gaps)  # how many requests are expected until each arrival
        ends = np.concatenate([[0.0], np.cumsum(self.durations)])
        expected = np.concatenate([[0.0], np.cumsum(np.multiply(self.durations, self.rates))])
        periods, within = np.divmod(number, expected[-1])
        return np.asarray(periods * ends[-1] + np.interp(within, expected, ends))
