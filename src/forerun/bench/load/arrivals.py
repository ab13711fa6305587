"""The moments at which requests come, drawn with a seed."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from forerun.bench.load.traffic import Traffic

GRID = 1000  # points over which the mean gap of a rising rate is taken

Floats = NDArray[np.float64]


def rates(traffic: Traffic, count: int) -> Floats:
    """Requests per second that hold when each of `count` requests comes."""
    if traffic.ramp_up_start_rps is None or traffic.ramp_up_end_rps is None:
        return np.full(count, traffic.request_rate)
    start, end = traffic.ramp_up_start_rps, traffic.ramp_up_end_rps
    progress = np.arange(count) / max(count - 1, 1)
    if traffic.ramp_up_strategy == "linear":
        return np.asarray(start + (end - start) * progress)
    return np.asarray(start * (end / start) ** progress)


def draw_arrivals(traffic: Traffic, count: int, random: np.random.Generator) -> Floats:
    """Seconds from the start at which `count` requests come.

    At a constant rate they are scaled so that the last comes at count / rate: the sum of random
    gaps would be off by a percent or two, and every throughput with it.
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
    """Seconds at which requests come, as many as fill `seconds` at the mean gap, none later."""
    mean_gap = float((1 / rates(traffic, GRID)).mean())
    times = draw_arrivals(traffic, max(round(seconds / mean_gap), 1), random)
    return np.asarray(times[times <= seconds * (1 + 1e-9)])
