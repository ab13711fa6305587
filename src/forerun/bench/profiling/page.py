"""Draws a profile as one HTML page that needs no other file: plots as SVG, and the figures behind them."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from forerun.bench.profiling.step_sweep import Cells, MeasuredStep
from forerun.plan.dynamo_files import PrefillPoint
from forerun.plan.profile import Profile

COLOURS = ("#94a3b8", "#0369a1", "#65a30d", "#c2410c", "#7c3aed", "#be185d", "#475569", "#ca8a04", "#0f766e", "#1e293b")
MOST_CURVES = len(COLOURS)

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1e293b}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}svg{max-width:100%;height:auto}
table{border-collapse:collapse}td,th{padding:.15rem .8rem;text-align:right;border-bottom:1px solid #e2e8f0}
td:first-child,th:first-child{text-align:left}"""


def write_page(
    profile: Profile, prefill: Sequence[PrefillPoint], cells: Cells, steps: Sequence[MeasuredStep], file: Path
) -> None:
    """Write the page of a profile.

    Args:
        profile: what was measured.
        prefill: prompts and their times.
        cells: median seconds of steps.
        steps: every measured step.
        file: to write.
    """
    parts = [
        f"<h1>{html.escape(profile.model)}</h1>",
        f"<p>{html.escape(profile.machine)}; {html.escape(profile.kernels)}, {profile.dtype}; "
        f"forerun {html.escape(profile.version)}{_bandwidth(profile)}</p>",
        "<h2>Prompts</h2><p>Time to the first token on an idle engine. Line: the fitted model.</p>",
        _drawn(partial(_draw_prefill, profile=profile, prefill=prefill)),
        "<h2>Steps</h2><p>Milliseconds of a step that verifies drafts of K tokens, drafting left out. "
        "Points: measured medians; lines: the fitted model.</p>",
    ]
    for context in sorted({context for _, context, _ in cells}):
        parts.append(_drawn(partial(_draw_steps, profile=profile, cells=cells, context=context)))
    if profile.acceptance:
        parts += [
            "<h2>Drafts</h2><p>The chance of each place of a draft to stand, all before it included.</p>",
            _drawn(partial(_draw_acceptance, profile=profile)),
            _acceptance_table(profile),
        ]
    parts += [
        "<h2>How well the model fits</h2>",
        _fit(profile),
        _drawn(partial(_draw_fit, profile=profile, steps=steps)),
    ]
    head = f'<meta charset="utf-8"><title>Profile of {html.escape(profile.model)}</title><style>{STYLE}</style>'
    body = "\n".join(parts)
    file.write_text(f"<!doctype html>\n<html lang=en><head>{head}</head><body>\n{body}\n</body></html>\n", "utf-8")


def _bandwidth(profile: Profile) -> str:
    speed = profile.gigabytes_per_second
    return "" if speed is None else f"; memory at {speed:.1f} GB/s"


def _drawn(draw: Callable[[Axes], None]) -> str:
    """A panel as SVG text."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    draw(axes)
    axes.spines[["top", "right"]].set_visible(False)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def _draw_prefill(axes: Axes, profile: Profile, prefill: Sequence[PrefillPoint]) -> None:
    lengths = np.unique(np.geomspace(1, max(point.isl for point in prefill), 60).astype(int))
    model = [
        1e3 * profile.step_times.ttft_seconds(int(length), max_num_batched_tokens=profile.max_num_batched_tokens)
        for length in lengths
    ]
    axes.plot(lengths, model, color=COLOURS[1])
    axes.plot([p.isl for p in prefill], [1e3 * p.ttft_seconds for p in prefill], "o", color=COLOURS[3])
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("ms")


def _draw_steps(axes: Axes, profile: Profile, cells: Cells, context: int) -> None:
    lengths = sorted({length for _, found, length in cells if found == context})[:MOST_CURVES]
    for colour, length in zip(COLOURS, lengths, strict=False):
        points = [(n, seconds) for (n, found, k), seconds in cells.items() if (found, k) == (context, length)]
        axes.plot([n for n, _ in points], [1e3 * seconds for _, seconds in points], "o", color=colour, markersize=4)
        sizes = np.arange(1, max(n for n, _ in points) + 1)
        model = [
            1e3
            * profile.step_times.seconds(
                num_rows=int(n) * (length + 1), num_sequences=int(n), num_context_tokens=int(n) * context
            )
            for n in sizes
        ]
        axes.plot(sizes, model, color=colour, label=f"K = {length}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(f"{context} tokens of context each", fontsize=10)
    axes.set_xlabel("sequences")
    axes.set_ylabel("ms")
    axes.legend(frameon=False, fontsize=8)


def _draw_acceptance(axes: Axes, profile: Profile) -> None:
    for colour, (name, found) in zip(COLOURS, profile.acceptance.items(), strict=False):
        line = "--" if "/" in name else "-"
        axes.plot(
            range(1, found.num_places + 1), found.marginal, line, marker="o", markersize=3, color=colour, label=name
        )
    axes.set_ylim(0, 1)
    axes.set_xlabel("place in the draft")
    axes.legend(frameon=False, fontsize=8)


def _acceptance_table(profile: Profile) -> str:
    rows = [
        f"<tr><td>{html.escape(name)}<td>{found.mean_accept_length:.2f}<td>{found.num_places}"
        f"<td>{found.num_reached[0] if found.num_reached else '-'}"
        f"<td>{_cost(profile, name)}</tr>"
        for name, found in profile.acceptance.items()
    ]
    head = "<tr><th>configuration/class<th>tokens per step<th>places<th>steps<th>drafting, ms per step + sequence + token</tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def _cost(profile: Profile, name: str) -> str:
    cost = profile.drafting.get(name)
    return "" if cost is None else " + ".join(f"{1e3 * part:.3f}" for part in cost.to_json().values())


def _fit(profile: Profile) -> str:
    error = profile.step_times.error
    if error is None:
        return ""
    return (
        f"<p>Over {error.num_shapes} shapes of steps the model is off by {error.median:.1%} in the median, "
        f"{error.p95:.1%} at the 95th percentile.</p>"
    )


def _draw_fit(axes: Axes, profile: Profile, steps: Sequence[MeasuredStep]) -> None:
    sweeps = sorted({step.sweep for step in steps})
    for colour, sweep in zip(COLOURS[1:], sweeps, strict=False):
        samples = [step.sample for step in steps if step.sweep == sweep]
        predicted = [1e3 * profile.step_times.of_shape(one.shape) for one in samples]
        axes.plot([1e3 * one.seconds for one in samples], predicted, ".", color=colour, label=sweep, markersize=3)
    low, high = axes.get_xlim()
    axes.plot([low, high], [low, high], color=COLOURS[0], linewidth=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    axes.set_xlabel("measured, ms")
    axes.set_ylabel("model, ms")
    axes.legend(frameon=False, fontsize=8)
