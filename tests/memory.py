"""What a piece of code keeps in memory, the test runner's own threads left out."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ALLOCATED_BY = [tracemalloc.Filter(True, f"*/{package}/*") for package in ("forerun", "numpy", "tests")]


@contextmanager
def bytes_kept() -> Iterator[Callable[[], int]]:
    """Yield a function that returns the bytes kept of what forerun, NumPy and the tests allocated since."""
    gc.collect()
    gc.freeze()  # so that a collection looks at what came since alone
    tracemalloc.start()
    try:
        yield _bytes_kept
    finally:
        tracemalloc.stop()
        gc.unfreeze()


def _bytes_kept() -> int:
    gc.collect()
    kept = tracemalloc.take_snapshot().filter_traces(ALLOCATED_BY)
    return sum(trace.size for trace in kept.traces)
