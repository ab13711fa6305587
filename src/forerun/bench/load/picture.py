"""Draws a load test: output over time, the phases of each request, and the latencies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from forerun.bench.load.answer import METRICS, Answer
from forerun.bench.load.figures import Timeline

WAIT_COLOUR, FIRST_COLOUR, REST_COLOUR = "#cbd5e1", "#0369a1", "#c2410c"
LATENCIES = ("ttft", "tpot", "icl", "e2el")


def draw(answers: Sequence[Answer], title: str, file: Path) -> None:
    """Draw three panels to a file in the format of its ending; failed requests are left out."""
    good = [answer for answer in answers if answer.error is None]
    figure = Figure(figsize=(11, 10), layout="constrained")
    output, phases, latencies = figure.subplots(3, 1)
    if good:
        _draw_output(output, good)
        _draw_phases(phases, good)
        _draw_latencies(latencies, good)
    figure.suptitle(title, fontsize=9)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def _draw_output(axes: Axes, answers: Sequence[Answer]) -> None:
    """Output tokens and running requests of each second."""
    timeline = Timeline.of(answers)
    seconds = np.arange(len(timeline.tokens))
    axes.step(seconds, timeline.tokens, where="post", color=REST_COLOUR)
    axes.set_ylabel("output tokens/s", color=REST_COLOUR)
    axes.set_ylim(bottom=0)
    beside = axes.twinx()
    beside.step(seconds, timeline.requests, where="post", color=FIRST_COLOUR)
    beside.set_ylabel("requests in that second", color=FIRST_COLOUR)
    beside.set_ylim(bottom=0)
    axes.set_title("output, by second")


def _draw_phases(axes: Axes, answers: Sequence[Answer]) -> None:
    """A line per request: time in the client's queue, to the first token, and to the last."""
    start = min(answer.started - answer.queue_time for answer in answers)
    parts = [
        ("waiting for a place", WAIT_COLOUR, [(a.started - a.queue_time, a.started) for a in answers]),
        ("to the first token", FIRST_COLOUR, [(a.started, a.started + a.ttft) for a in answers]),
        ("to the last", REST_COLOUR, [(a.started + a.ttft, a.started + a.latency) for a in answers]),
    ]
    for name, colour, spans in parts:
        begins = np.array([begin for begin, _ in spans]) - start
        widths = np.array([end - begin for begin, end in spans])
        axes.barh(np.arange(len(spans)), widths, left=begins, height=1.0, color=colour, label=name)
    axes.set_title("requests, in the order they came; seconds")
    axes.legend(loc="upper right", fontsize=8, frameon=False)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def _draw_latencies(axes: Axes, answers: Sequence[Answer]) -> None:
    """The cumulative distribution of each latency, over milliseconds."""
    for name in LATENCIES:
        values = np.sort([1e3 * value for answer in answers for value in METRICS[name].values(answer)])
        if len(values):
            axes.step(values, np.arange(1, len(values) + 1) / len(values), where="post", label=METRICS[name].short)
    axes.set_xscale("symlog", linthresh=1)
    axes.set_title("share of latencies up to; milliseconds")
    axes.legend(loc="upper right", fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
