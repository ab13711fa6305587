"""Draws what a simulation found, with matplotlib: output, waiting requests and KV memory over time, and latencies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from forerun.bench.picture import FIRST_COLOUR, REST_COLOUR, WAIT_COLOUR, hide_frame, save_figure
from forerun.plan.simulation.result import Floats, SimulationResult
from forerun.plan.sla import Sla

NUM_INTERVALS = 400
"""Into which the time of a simulation is divided, at most; none is shorter than a second."""

DRAWN_LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "icl": "ICL", "e2el": "E2EL"}


def draw_simulation(
    result: SimulationResult, title: str, file: Path, *, num_blocks: int, sla: Sla | None = None
) -> None:
    """Draw a simulation into a file, in the format of its ending.

    Args:
        result: what was found.
        title: says what was simulated.
        file: where to; an .svg is the same bytes each time.
        num_blocks: KV blocks of each engine.
        sla: limits that are drawn beside the latencies.
    """
    figure = Figure(figsize=(11, 12), layout="constrained")
    output, queue, memory, latencies = figure.subplots(4, 1)
    seconds = result.seconds
    ends = np.linspace(0, seconds, min(NUM_INTERVALS, max(1, round(seconds))) + 1)
    _draw_output(output, result, ends)
    _draw_queue(queue, result, ends)
    _draw_memory(memory, result, ends, num_blocks)
    _draw_latencies(latencies, result, sla)
    figure.suptitle(title, fontsize=9)
    save_figure(figure, file)


def _draw_output(axes: Axes, result: SimulationResult, ends: Floats) -> None:
    """Output tokens per second."""
    tokens = np.zeros(len(ends) - 1)
    for log in result.steps:
        times = np.asarray(log.ends) - result.start
        tokens += np.histogram(times, bins=ends, weights=np.asarray(log.num_tokens))[0]
    axes.stairs(tokens / np.diff(ends), ends, color=REST_COLOUR)
    axes.set_ylim(bottom=0)
    axes.set_title("output tokens per second, over seconds")
    hide_frame(axes)


def _draw_queue(axes: Axes, result: SimulationResult, ends: Floats) -> None:
    """Requests that run and that wait, of all replicas together."""
    running, waiting = np.zeros((2, len(ends)))
    for log in result.steps:
        if not log.ends:
            continue
        times = np.asarray(log.ends) - result.start
        places = np.searchsorted(times, ends)  # of the step that goes on at each moment, or comes next
        known = places < len(times)
        places = np.minimum(places, len(times) - 1)
        is_busy = known & (times[places] - np.asarray(log.seconds)[places] <= ends)
        running += np.where(is_busy, np.asarray(log.num_running)[places], 0)
        waiting += np.where(is_busy, np.asarray(log.num_waiting)[places], 0)
    axes.fill_between(ends, running, step="mid", color=FIRST_COLOUR, label="running")
    axes.fill_between(ends, running, running + waiting, step="mid", color=WAIT_COLOUR, label="waiting")
    axes.set_title("requests, over seconds")
    axes.legend(loc="upper right", fontsize=8, frameon=False)
    hide_frame(axes)


def _draw_memory(axes: Axes, result: SimulationResult, ends: Floats, num_blocks: int) -> None:
    """The share of the KV memory in use, a line for each replica."""
    for log in result.steps:
        if log.ends:
            times = np.asarray(log.ends) - result.start
            places = np.clip(np.searchsorted(times, ends, side="right") - 1, 0, None)
            used = np.asarray(log.num_used_blocks)[places] / num_blocks
            axes.step(ends, used, where="post", linewidth=0.8, color=FIRST_COLOUR, alpha=0.6)
    axes.set_ylim(0, 1)
    axes.set_title("KV memory in use, by replica, over seconds")
    hide_frame(axes)


def _draw_latencies(axes: Axes, result: SimulationResult, sla: Sla | None) -> None:
    """The cumulative distribution of each latency, over milliseconds, and the limits."""
    for name, short in DRAWN_LATENCIES.items():
        found = result.latencies(name)
        if not found.num_values:
            continue
        shares = np.cumsum(found.counts) / found.num_values
        (line,) = axes.step(1e3 * found.values, shares, where="post", label=short)
        limit = None if sla is None else getattr(sla, name)
        if limit is not None:
            axes.axvline(1e3 * limit, color=line.get_color(), linestyle=":")
    axes.set_xscale("symlog", linthresh=1)
    axes.set_title("share of latencies up to; milliseconds (dotted: the limits)")
    axes.legend(loc="upper right", fontsize=8, frameon=False)
    hide_frame(axes)
