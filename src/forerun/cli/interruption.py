"""What Ctrl-C leaves of a long command: figures of what was measured by then, or a folder to go on from."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from forerun.bench.instruments import Interrupted

T = TypeVar("T")


def until_interrupted(measure: Callable[[], T]) -> tuple[T, bool]:
    """What a measurement has found, and whether Ctrl-C ended it early, which is said on standard error.

    Raises:
        KeyboardInterrupt: it came before there was anything to show.
    """
    try:
        return measure(), False
    except Interrupted as interruption:
        print(f"interrupted: the figures are of {interruption.part}", file=sys.stderr)
        found: T = interruption.found
        return found, True


@contextmanager
def resumable(keeps: Callable[[], bool], *, without: str | None = None) -> Iterator[None]:
    """Tell whoever interrupts a command that it goes on when it is given again.

    Args:
        keeps: whether anything is kept by then; if not, nothing is told.
        without: an option that would begin anew.
    """
    try:
        yield
    except KeyboardInterrupt:
        if keeps():
            print(
                f"interrupted: the same command{f' without {without}' if without else ''} goes on from here",
                file=sys.stderr,
            )
        raise
