"""Draws a day of traffic as it was planned: requests that came, engines that were planned, who attained the SLA."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from forerun.bench.picture import FIRST_COLOUR, WAIT_COLOUR, hide_frame, save_figure
from forerun.plan.day_plan import SECONDS_PER_HOUR, DayPlan
from forerun.plan.day_replay import MEAN, ORACLE, PEAK
from forerun.plan.sla import Sla


def draw_days(days: Sequence[DayPlan], title: str, sla: Sla, file: Path) -> None:
    """Draw a day under several ways to plan it, in the format of the file's ending; what was simulated in a part of its own.

    Args:
        days: the same intervals, planned by each.
        title: says of what.
        sla: whose attainment is drawn as a line.
        file: where to.
    """
    is_simulated = all(one.simulated for one in days)
    figure = Figure(figsize=(11, 12 if is_simulated else 9), layout="constrained")
    parts = figure.subplots(4 if is_simulated else 3, 1, sharex=True)
    rates, engines, attained = parts[:3]
    _draw_rates(rates, days[0])
    for one in days:
        if one.name != MEAN:
            _draw_steps(engines, one, [interval.engines for interval in one.intervals])
            _draw_shares(attained, one, [interval.attained for interval in one.intervals])
            if one.simulated and is_simulated:
                _draw_shares(parts[3], one, one.simulated.attained)
    for axes in parts[2:]:
        axes.axhline(100.0 * sla.attainment, color="black", linewidth=0.8, linestyle=":")
    engines.set_title("engines")
    engines.set_ylim(bottom=0)
    attained.set_title("% of the interval's requests within the SLA, by the formulas")
    if is_simulated:
        parts[3].set_title("% of the interval's requests within the SLA, in the simulator")
    parts[-1].set_xlabel("hours")
    for axes in parts:
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


def _draw_shares(axes: Axes, day: DayPlan, attained: Sequence[float]) -> None:
    counts = [max(1, interval.num_requests) for interval in day.intervals]
    _draw_steps(axes, day, [100.0 * kept / count for kept, count in zip(attained, counts, strict=True)])


def _draw_steps(axes: Axes, day: DayPlan, values: Sequence[float]) -> None:
    hours = [one.start / SECONDS_PER_HOUR for one in day.intervals]
    style = {ORACLE: "--", PEAK: ":"}.get(day.name, "-")
    axes.step(
        hours, values, where="post", linestyle=style, linewidth=1.0, label=f"{day.name}: {day.engine_hours:.0f} h"
    )
