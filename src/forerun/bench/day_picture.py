"""Draws a day of traffic as it was planned: requests that came, engines that were planned, who attained the SLA."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from forerun.bench.picture import FIRST_COLOUR, WAIT_COLOUR, hide_frame, save_figure
from forerun.plan.day_replay import MEAN, ORACLE, PEAK, SECONDS_PER_HOUR, DayPlan
from forerun.plan.sla import Sla


def draw_days(days: Sequence[DayPlan], title: str, sla: Sla, file: Path) -> None:
    """Draw a day under several ways to plan it, in the format of the file's ending.

    Args:
        days: the same intervals, planned by each.
        title: says of what.
        sla: whose attainment is drawn as a line.
        file: where to.
    """
    figure = Figure(figsize=(11, 9), layout="constrained")
    rates, engines, attained = figure.subplots(3, 1, sharex=True)
    _draw_rates(rates, days[0])
    for one in days:
        if one.name != MEAN:
            _draw_steps(engines, one, [interval.engines for interval in one.intervals])
            shares = [interval.attained / max(1, interval.num_requests) for interval in one.intervals]
            _draw_steps(attained, one, [100.0 * share for share in shares])
    attained.axhline(100.0 * sla.attainment, color="black", linewidth=0.8, linestyle=":")
    engines.set_title("engines")
    engines.set_ylim(bottom=0)
    attained.set_title("% of the interval's requests within the SLA; hours")
    for axes in (rates, engines, attained):
        hide_frame(axes)
    engines.legend(loc="upper right", fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=9)
    save_figure(figure, file)


def _draw_rates(axes: Axes, day: DayPlan) -> None:
    hours = [one.start / SECONDS_PER_HOUR for one in day.intervals]
    axes.step(hours, [one.rate for one in day.intervals], where="post", color=WAIT_COLOUR, label="came")
    predicted = [one.predicted_rate for one in day.intervals]
    axes.step(hours, predicted, where="post", color=FIRST_COLOUR, linewidth=0.8, label=f"predicted: {day.name}")
    axes.set_title("requests per second")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right", fontsize=8, frameon=False)


def _draw_steps(axes: Axes, day: DayPlan, values: Sequence[float]) -> None:
    hours = [one.start / SECONDS_PER_HOUR for one in day.intervals]
    style = {ORACLE: "--", PEAK: ":"}.get(day.name, "-")
    axes.step(
        hours, values, where="post", linestyle=style, linewidth=1.0, label=f"{day.name}: {day.engine_hours:.0f} h"
    )
