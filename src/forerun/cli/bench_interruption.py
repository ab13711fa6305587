"""What a benchmark shows after Ctrl-C: the figures of what was measured by then."""

from __future__ import annotations

import sys
from collections.abc import Callable
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
