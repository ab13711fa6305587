"""The arrivals of batches: one after the other up to a number of prompts, or at a rate for some time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.experiment.settings import Settings
from forerun.bench.instruments import Clock

Sleep = Callable[[float], object]


@dataclass(frozen=True, slots=True)
class BatchArrival:
    """The arrival of a batch at the engine."""

    num_prompts: int
    elapsed: float  # seconds since the start
    late: float  # seconds after it was due, because the engine was busy


def batch_arrivals(
    settings: Settings, clock: Clock = time.perf_counter, sleep: Sleep = time.sleep
) -> Iterator[BatchArrival]:
    """Yield each batch when it is due; the caller computes it before it asks for the next one.

    At a rate, a batch is due every (its prompts / AUTO_RATE) seconds. A batch that is late arrives at once, and
    none arrives after AUTO_DURATION.
    """
    size = settings.prompts_per_batch
    start = clock()
    if settings.num_prompts:
        for done in range(0, settings.num_prompts, size):
            yield BatchArrival(min(size, settings.num_prompts - done), clock() - start, 0.0)
        return
    for number in itertools.count():
        due = number * size / settings.auto_rate
        if max(due, clock() - start) >= settings.auto_duration:
            sleep(max(0.0, settings.auto_duration - (clock() - start)))
            return
        sleep(max(0.0, due - (clock() - start)))
        elapsed = clock() - start
        yield BatchArrival(size, elapsed, elapsed - due)
