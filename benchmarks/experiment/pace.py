"""When batches are given: one after the other by count, or at a rate for some time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.experiment.settings import Settings
from forerun.bench.instruments import Clock

Sleep = Callable[[float], object]


@dataclass(frozen=True, slots=True)
class Turn:
    """A batch of so many prompts, given `late` seconds after it was due because the engine was busy."""

    num_prompts: int
    elapsed: float
    late: float


def turns(settings: Settings, clock: Clock = time.perf_counter, sleep: Sleep = time.sleep) -> Iterator[Turn]:
    """Batches in order; whoever iterates computes one before asking for the next.

    At a rate, a batch is due every (its prompts / AUTO_RATE) seconds. The engine gets one at a time: one that is
    late is given at once, and none after AUTO_DURATION.
    """
    size = settings.prompts_per_batch
    start = clock()
    if settings.num_prompts:
        for done in range(0, settings.num_prompts, size):
            yield Turn(min(size, settings.num_prompts - done), clock() - start, 0.0)
        return
    for number in itertools.count():
        due = number * size / settings.auto_rate
        if max(due, clock() - start) >= settings.auto_duration:
            sleep(max(0.0, settings.auto_duration - (clock() - start)))
            return
        sleep(max(0.0, due - (clock() - start)))
        elapsed = clock() - start
        yield Turn(size, elapsed, elapsed - due)
