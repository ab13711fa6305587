"""Pulls models, with a progress bar for each stage of a pull."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from forerun.cli.console import plain_console
from forerun.models import download, store

LABELS = {"download": "Downloading", "check": "Checking", "convert": "Converting"}


def pull(name: str) -> Path:
    """Pull a known model, or check the files that are there, with progress bars."""
    with pull_bars() as report:
        return store.pull(name, report=report)


@contextmanager
def pull_bars() -> Iterator[download.Report]:
    """Show one bar per stage of a pull, if stderr is a terminal."""
    console = plain_console(stderr=True)
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(),
        TextColumn("{task.fields[size]:>13}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        yield _BarPerStage(bars)


class _BarPerStage:
    """Draws the progress of a pull: each stage has a bar, which stops when the next stage begins."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}
        self._current: TaskID | None = None

    def __call__(self, progress: download.Progress) -> None:
        if progress.stage not in LABELS:
            return
        if progress.stage not in self._tasks:
            self._tasks[progress.stage] = self._bars.add_task(LABELS[progress.stage], total=progress.total, size="")
        task = self._tasks[progress.stage]
        if self._current not in (None, task):
            self._bars.stop_task(self._current)
        self._current = task
        size = ""
        if progress.total:
            scale, unit = (1e6, "MB") if progress.total >= 1e5 else (1e3, "kB")
            size = f"{progress.done / scale:.1f}/{progress.total / scale:.1f} {unit}"
        self._bars.update(task, completed=progress.done, total=progress.total, size=size)
