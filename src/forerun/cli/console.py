"""Terminals: a console that shows texts as they are, progress bars and spinners; with rich, which takes a while to import."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import rich.progress
from rich.console import Console
from rich.text import Text

from forerun.bench.instruments import Progress

PLENTY = 120


def table_width() -> int | None:
    """Columns for tables: None for as many as the terminal has, plenty where there is none."""
    return None if sys.stdout.isatty() else PLENTY


def plain_console(*, stderr: bool = False, width: int | None = None, quiet: bool = False) -> Console:
    """A console that shows texts as they are: names, paths and prompts may hold what rich takes for markup or for an emoji.

    On standard output it is as wide as `table_width` says.
    """
    wide = width if stderr or width is not None else table_width()
    return Console(stderr=stderr, width=wide, quiet=quiet, highlight=False, markup=False, emoji=False)


class Bar:
    """A bar of a measurement's progress, with the line that says what is measured; made by `bar`."""

    def __init__(self, shown: rich.progress.Progress) -> None:
        self._shown = shown
        self._task = shown.add_task("starting", total=1.0)

    def progress(self, line: str) -> None:
        """Say what is measured."""
        self._shown.update(self._task, description=line)

    def advance(self, share: float) -> None:
        """Show that so much is done, from 0 to 1."""
        self._shown.update(self._task, completed=share)


@contextmanager
def bar(console: Console | None = None) -> Iterator[Bar]:
    """Show a measurement's progress as a bar with the time left, on stderr, if that is a terminal."""
    console = plain_console(stderr=True) if console is None else console
    columns = (
        rich.progress.SpinnerColumn(),
        rich.progress.BarColumn(),
        rich.progress.TaskProgressColumn(),
        rich.progress.TimeRemainingColumn(),
        rich.progress.TextColumn("{task.description}", markup=False),
    )
    with rich.progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        yield Bar(shown)


@contextmanager
def status() -> Iterator[Progress]:
    """Show how far a measurement is on one line of stderr, if that is a terminal."""
    with plain_console(stderr=True).status("starting") as shown:
        yield lambda line: shown.update(Text(line))  # of a text alone rich would read markup here, too


@contextmanager
def spinner(text: str) -> Iterator[None]:
    """Show a spinner with `text` while the block runs, if stderr is a terminal."""
    console = plain_console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(Text(text)):  # of a text alone rich would read markup here, too
        yield
