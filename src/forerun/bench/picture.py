"""Draws a comparison as bars: speeds, and the time of each phase of a step."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from forerun.bench.outcomes import PLAIN, Comparison, Outcome

PLAIN_COLOUR, DRAFTED_COLOUR = "#94a3b8", "#c2410c"
PHASE_COLOURS = {
    "schedule": "#cbd5e1",
    "build": "#94a3b8",
    "forward": "#0369a1",
    "verify": "#65a30d",
    "commit": "#475569",
    "draft": "#c2410c",
}


def draw(comparison: Comparison, file: Path) -> None:
    """Draw two panels for each kind of prompts, to a file in the format of its ending."""
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
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def _draw_speeds(axes: Axes, kind: str, outcomes: list[Outcome]) -> None:
    """Draw tokens per second, labelled with the speed-up."""
    colours = [PLAIN_COLOUR if one.name == PLAIN else DRAFTED_COLOUR for one in outcomes]
    bars = axes.barh([one.name for one in outcomes], [one.tokens_per_second for one in outcomes], color=colours)
    axes.bar_label(bars, [f"{one.tokens_per_second:.0f} ({one.speed_up:.2f}x)" for one in outcomes], padding=3)
    axes.margins(x=0.25)
    axes.set_title(f"{kind}: tokens/s")
    _tidy(axes)


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
    _tidy(axes)


def _tidy(axes: Axes) -> None:
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
