"""Draws a tuning: latency against throughput of all that was simulated and run, with the Pareto front."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from forerun.plan.tuning.tuning_report import TuningReport

SIMULATED_COLOUR, RUN_COLOUR, BEST_COLOUR = "#94a3b8", "#0369a1", "#c2410c"
NUM_LABELLED = 8  # of those that were only simulated


def draw_tuning(report: TuningReport, file: Path) -> None:
    """Draw one panel, and a second one with the energy of each run where that was counted."""
    runs = report.medians
    has_energy = all(run.joules_per_token is not None for run in runs.values())
    figure = Figure(figsize=(11 if has_energy else 8, 5.5), layout="constrained")
    panels = figure.subplots(1, 2 if has_energy else 1, squeeze=False)[0]
    _draw_front(panels[0], report)
    if has_energy:
        names = list(runs)
        colours = [BEST_COLOUR if name == report.choice.name else RUN_COLOUR for name in names]
        panels[1].barh(names, [runs[name].joules_per_token or 0.0 for name in names], color=colours)
        panels[1].set_title("joules per output token")
        panels[1].invert_yaxis()
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{report.model}, {report.load}; best for {report.objective}: {report.choice.name}\n{report.machine}",
        fontsize=9,
    )
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def _draw_front(axes: Axes, report: TuningReport) -> None:
    """Mean milliseconds of a request against tokens per second: right and low is good."""
    runs, best = report.medians, report.choice.name
    simulated = [one for one in report.screened if one.candidate.name not in runs]
    axes.scatter(
        [one.figures.tokens_per_second for one in simulated],
        [1e3 * one.figures.e2el.mean for one in simulated],
        facecolors="none",
        edgecolors=SIMULATED_COLOUR,
        s=24,
        label="simulated only",
    )
    for one in simulated[:NUM_LABELLED]:
        axes.annotate(
            one.candidate.name,
            (one.figures.tokens_per_second, 1e3 * one.figures.e2el.mean),
            fontsize=6,
            color=SIMULATED_COLOUR,
            xytext=(3, 3),
            textcoords="offset points",
        )
    front = report.front()
    axes.plot(
        [runs[name].tokens_per_second for name in front],
        [1e3 * runs[name].e2el.mean for name in front],
        color=RUN_COLOUR,
        linewidth=1,
        label="Pareto front of the runs",
    )
    for name, run in runs.items():
        colour = BEST_COLOUR if name == best else RUN_COLOUR
        axes.scatter([run.tokens_per_second], [1e3 * run.e2el.mean], color=colour, s=36)
        axes.annotate(
            name,
            (run.tokens_per_second, 1e3 * run.e2el.mean),
            fontsize=8,
            color=colour,
            xytext=(4, -10),
            textcoords="offset points",
        )
    axes.set_xlabel("output tokens/s")
    axes.set_ylabel("ms per request, mean")
    axes.margins(0.12)
    axes.legend(fontsize=8, frameon=False)
