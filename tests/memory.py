"""What drafters keep in memory, what other threads of the test runner allocate meanwhile left out."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ALLOCATED_BY = [tracemalloc.Filter(True, f"*/{package}/*") for package in ("drafters", "numpy")]
PAUSE = 0.01  # seconds


@contextmanager
def bytes_kept() -> Iterator[Callable[[], int]]:
    """Yield a function that returns the bytes kept of what drafters, their tests and NumPy allocated since."""
    gc.collect()
    gc.freeze()  # so that a collection looks at what came since alone; all else is for later tests to keep frozen, too
    tracemalloc.start()
    try:
        yield _bytes_kept
    finally:
        tracemalloc.stop()


def _bytes_kept() -> int:
    """Return the least of two looks: what a thread of an earlier test holds for a moment is not kept."""
    first = _bytes_allocated()
    time.sleep(PAUSE)
    return min(first, _bytes_allocated())


def _bytes_allocated() -> int:
    gc.collect()
    kept = tracemalloc.take_snapshot().filter_traces(ALLOCATED_BY)
    return sum(trace.size for trace in kept.traces)
