"""The arrivals: quiet phases and bursts in turn, in each a Poisson process."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Swing:
    """A quiet phase and a burst; rates in requests per second.

    The defaults fit a small model on two cores: about one request runs in the quiet phase, and the burst
    brings more than can be answered meanwhile, so that the number of running requests climbs to 64.
    """

    quiet_rate: float = 0.7
    quiet_seconds: float = 14.0
    burst_rate: float = 16.0
    burst_seconds: float = 4.0

    @property
    def seconds(self) -> float:
        """The duration of both phases."""
        return self.quiet_seconds + self.burst_seconds


def draw_arrivals(swing: Swing, *, num_swings: int, seed: int) -> list[float]:
    """Arrival times in seconds from the start, in order; the same ones for the same seed.

    Each phase has as many requests as its rate times its duration, at random moments: a Poisson process of
    that many arrivals, so that no seed has more work than another.
    """
    source = random.Random(seed)
    times: list[float] = []
    for number in range(num_swings):
        start = number * swing.seconds
        for rate, begin, seconds in (
            (swing.quiet_rate, start, swing.quiet_seconds),
            (swing.burst_rate, start + swing.quiet_seconds, swing.burst_seconds),
        ):
            times += sorted(begin + source.random() * seconds for _ in range(round(rate * seconds)))
    return times
