"""Draws the arrival times of requests."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from forerun.bench.load.workload import Traffic

NUM_POINTS = 1000  # at which a rising rate is sampled for its mean gap

Floats = NDArray[np.float64]


def rates(traffic: Traffic, count: int) -> Floats:
    """The rate, in requests per second, at the arrival of each of `count` requests."""
    if traffic.ramp_up_start_rps is None or traffic.ramp_up_end_rps is None:
        return np.full(count, traffic.request_rate)
    start, end = traffic.ramp_up_start_rps, traffic.ramp_up_end_rps
    progress = np.arange(count) / max(count - 1, 1)
    if traffic.ramp_up_strategy == "linear":
        return np.asarray(start + (end - start) * progress)
    return np.asarray(start * (end / start) ** progress)


def draw_arrivals(traffic: Traffic, count: int, random: np.random.Generator) -> Floats:
    """Arrival times of `count` requests, in seconds from the start.

    At a constant rate they are scaled so that the last request arrives at count / rate: the sum of
    random gaps, and so every throughput, would be off by a percent or two.
    """
    if not traffic.has_rate:
        return np.zeros(count)
    gaps = 1 / rates(traffic, count)
    if traffic.burstiness != math.inf:
        gaps = random.gamma(traffic.burstiness, gaps / traffic.burstiness)
    times = np.cumsum(gaps)
    if traffic.ramp_up_strategy is None:
        times *= count / traffic.request_rate / times[-1]
    return np.asarray(times)


def draw_arrivals_within(traffic: Traffic, seconds: float, random: np.random.Generator) -> Floats:
    """Arrival times within `seconds`: as many as fill them at the mean gap, without those that fall later."""
    mean_gap = float((1 / rates(traffic, NUM_POINTS)).mean())
    times = draw_arrivals(traffic, max(round(seconds / mean_gap), 1), random)
    return np.asarray(times[times <= seconds * (1 + 1e-9)])
