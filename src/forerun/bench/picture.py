"""Draws the results of benchmarks as pictures, with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from forerun.bench.load.answer import METRICS, Answer
from forerun.bench.load.figures import Timeline

if TYPE_CHECKING:
    from forerun.bench.outcomes import Comparison, Outcome

PLAIN_COLOUR, DRAFTED_COLOUR = "#94a3b8", "#c2410c"
PHASE_COLOURS = {
    "schedule": "#cbd5e1",
    "build": "#94a3b8",
    "launch": "#64748b",
    "forward": "#0369a1",
    "wait": "#7dd3fc",
    "verify": "#65a30d",
    "commit": "#475569",
    "draft": "#c2410c",
}

# of a request: waiting in the client, up to the first token, up to the last
WAIT_COLOUR, FIRST_COLOUR, REST_COLOUR = "#cbd5e1", "#0369a1", "#c2410c"
DRAWN_LATENCIES = ("ttft", "tpot", "icl", "e2el")


def draw_comparison(comparison: Comparison, file: Path) -> None:
    """Draw two panels for each kind of prompts: speeds, and the time of each phase of a step."""
    kinds = comparison.by_kind
    num_bars = max(map(len, kinds.values()))
    figure = Figure(figsize=(11, 1 + len(kinds) * (1 + 0.35 * num_bars)), layout="constrained")
    panels = figure.subplots(len(kinds), 2, squeeze=False)
    for (speeds, steps), (kind, outcomes) in zip(panels, kinds.items(), strict=True):
        _draw_speeds(speeds, kind, outcomes)
        _draw_steps(steps, outcomes)
    handles, labels = panels[0][1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower right", ncols=len(PHASE_COLOURS), frameon=False, fontsize=8)
    figure.suptitle(
        f"{comparison.model}, {comparison.dtype}, kernels: {comparison.kernels}, {comparison.batch_size} prompt(s) at once, "
        f"temperature {comparison.temperature:g}\n{comparison.machine}",
        fontsize=9,
    )
    save_figure(figure, file)


def _draw_speeds(axes: Axes, kind: str, outcomes: list[Outcome]) -> None:
    """Draw tokens per second, labelled with the speed-up."""
    from forerun.bench.outcomes import PLAIN  # torch, which a client that draws a load test does without

    colours = [PLAIN_COLOUR if one.name == PLAIN else DRAFTED_COLOUR for one in outcomes]
    bars = axes.barh([one.name for one in outcomes], [one.tokens_per_second for one in outcomes], color=colours)
    axes.bar_label(bars, [f"{one.tokens_per_second:.0f} ({one.speed_up:.2f}x)" for one in outcomes], padding=3)
    axes.margins(x=0.25)
    axes.set_title(f"{kind}: tokens/s")
    axes.invert_yaxis()
    hide_frame(axes)


def _draw_steps(axes: Axes, outcomes: list[Outcome]) -> None:
    """Draw the milliseconds of each phase per decoded token, stacked."""
    names = [one.name for one in outcomes]
    lengths = [one.speculation.acceptance_length or 1.0 for one in outcomes]
    left = [0.0] * len(outcomes)
    for phase, colour in PHASE_COLOURS.items():
        widths = [
            one.milliseconds_per_step.get(phase, 0.0) / length for one, length in zip(outcomes, lengths, strict=True)
        ]
        axes.barh(names, widths, left=left, color=colour, label=phase)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_title("ms per token and sequence, by phase")
    axes.invert_yaxis()
    hide_frame(axes)


def draw_load(answers: Sequence[Answer], title: str, file: Path) -> None:
    """Draw output over time, the phases of each request, and the latencies; failed requests are left out."""
    good = [answer for answer in answers if answer.error is None]
    figure = Figure(figsize=(11, 10), layout="constrained")
    output, phases, latencies = figure.subplots(3, 1)
    if good:
        _draw_output(output, good)
        _draw_phases(phases, good)
        _draw_latencies(latencies, good)
    figure.suptitle(title, fontsize=9)
    save_figure(figure, file)


def _draw_output(axes: Axes, answers: Sequence[Answer]) -> None:
    """Output tokens, or chunks where these are not known, and running requests of each second."""
    timeline = Timeline.of(answers)
    seconds = np.arange(len(timeline.requests))
    shown, what = (timeline.chunks, "chunks") if timeline.tokens is None else (timeline.tokens, "output tokens")
    axes.step(seconds, shown, where="post", color=REST_COLOUR)
    axes.set_ylabel(f"{what}/s", color=REST_COLOUR)
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
    hide_frame(axes)


def _draw_latencies(axes: Axes, answers: Sequence[Answer]) -> None:
    """The cumulative distribution of each latency, over milliseconds."""
    for name in DRAWN_LATENCIES:
        values = np.sort([1e3 * value for answer in answers for value in METRICS[name].values(answer)])
        if len(values):
            axes.step(values, np.arange(1, len(values) + 1) / len(values), where="post", label=METRICS[name].short)
    axes.set_xscale("symlog", linthresh=1)
    axes.set_title("share of latencies up to; milliseconds")
    axes.legend(loc="upper right", fontsize=8, frameon=False)
    hide_frame(axes)


def hide_frame(axes: Axes) -> None:
    """Draw only the left and lower sides of a panel's frame."""
    axes.spines[["top", "right"]].set_visible(False)


def save_figure(figure: Figure, file: Path) -> None:
    """Write a figure in the format of the file's ending; an .svg gets no date, and names of its parts that are always the same."""
    with rc_context({"svg.hashsalt": "forerun"}):
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
