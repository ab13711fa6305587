"""Draws the speeds of a run as bars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.peers.engines import CONTENDERS, FORERUN, Contender
from benchmarks.peers.schedule import SPECULATED_KINDS
from benchmarks.peers.summary import Summary, decode_speed

PANELS = {
    "plain": "1 sequence, plain",
    "batch": "8 sequences, plain",
    "code": "code edits",
    "chat": "chat",
}
OWN, OTHERS = "#c2410c", "#94a3b8"


def draw(run: dict[str, Any], file: Path) -> None:
    """Draw the tokens per second of all contenders by kind of cell, to a file in the format of its ending."""
    summary = Summary(run["measurements"])
    figure = Figure(figsize=(11, 7), layout="constrained")
    for axes, (kind, title) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        bars = _bars(summary, kind)
        names, speeds = [one.name for one in bars], list(bars.values())
        drawn = axes.barh(names, speeds, color=[OWN if one.peer == FORERUN.name else OTHERS for one in bars])
        axes.bar_label(drawn, fmt="%.0f", padding=3)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_title(title)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Decoding, tokens/s: {run['model']}, {run['num_threads']} threads\n{run['machine']}", fontsize=10)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def _bars(summary: Summary, kind: str) -> dict[Contender, float]:
    """Speeds of the measured contenders, fastest first; speculated kinds leave out the peers' plain decoding."""
    found = {one: summary.median(one.name, kind, decode_speed) for one in CONTENDERS}
    speeds = {one: speed for one, speed in found.items() if speed is not None}
    if kind in SPECULATED_KINDS:
        speeds = {
            one: speed for one, speed in speeds.items() if one.speculation is not None or one.peer == FORERUN.name
        }
    return dict(sorted(speeds.items(), key=lambda item: -item[1]))
