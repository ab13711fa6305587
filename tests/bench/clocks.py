"""Fake clocks of tests."""

from __future__ import annotations


class TickingClock:
    """Every look at it comes one second after the one before."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


class SlowingClock:
    """Seconds between looks double after each `looks_per_round` of them, as on a machine that gets slower."""

    def __init__(self, looks_per_round):
        self.looks_per_round = looks_per_round
        self.num_looks = 0
        self.now = 0.0

    def __call__(self):
        self.now += 2.0 ** (self.num_looks // self.looks_per_round)
        self.num_looks += 1
        return self.now
