"""What other programs take of the processor while something is measured."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil

BUSY = ("user", "nice", "system", "irq", "softirq")


@dataclass(slots=True)
class OthersTime:
    """Cores that other programs kept busy on average, once the measurement is over."""

    cores: float = 0.0


@contextmanager
def others_time(servers: Sequence[psutil.Process]) -> Iterator[OthersTime]:
    """Count the processor time of all programs but this one, those that it starts and waits for, and these servers."""
    ours = [psutil.Process(), *servers]
    found, start = OthersTime(), time.monotonic()
    before = _busy_seconds(), sum(map(_seconds, ours))
    yield found
    busy = _busy_seconds() - before[0]
    own = sum(map(_seconds, ours)) - before[1]
    found.cores = max(0.0, busy - own) / (time.monotonic() - start)


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return float(sum(getattr(times, name, 0.0) for name in BUSY))


def _seconds(process: psutil.Process) -> float:
    """Of a process and of the children that it has waited for."""
    with suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        return float(times.user + times.system + times.children_user + times.children_system)
    return 0.0
