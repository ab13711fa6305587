"""The instruments of measurements: a clock, a stopwatch for work on a device, a probe of memory bandwidth; what Ctrl-C leaves of one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")

Clock = Callable[[], float]
"""Returns seconds since a fixed moment."""

Progress = Callable[[str], None]
"""Is called with a line that says how far a measurement is."""

Advance = Callable[[float], None]
"""Is called with the share of a measurement that is done, from 0 to 1, as far as it was estimated well."""

BUFFER_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
"""Bytes that the bandwidth probe reads, by kind of device: several times the device's caches."""
NUM_READS = 3

Read = Callable[["Tensor"], object]
"""Reads a contiguous buffer once, with all cores."""


def no_progress(message: str) -> None:
    """Show no progress."""


def no_advance(share: float) -> None:
    """Show no progress."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C ended a measurement early; whoever can use a part of it finds that here.

    Attributes:
        found: the result of the part that was measured by then.
        part: which one that is, for people, e.g. "3 of 30 rounds".
    """

    def __init__(self, found: Any, part: str) -> None:
        super().__init__(part)
        self.found = found
        self.part = part


def whole_rounds(measure: Callable[[int], T], repeats: int) -> list[T]:
    """Measure so many rounds, each by its number from 0; fewer where Ctrl-C comes after a whole one.

    Raises:
        KeyboardInterrupt: it came before the first round was whole.
    """
    rounds: list[T] = []
    try:
        for number in range(repeats):
            rounds.append(measure(number))
    except KeyboardInterrupt:
        if not rounds:
            raise
    return rounds


@dataclass(slots=True)
class Work:
    """How much is done of a work that was estimated to take so many seconds."""

    seconds: float
    advance: Advance = no_advance
    done: float = 0.0

    def add(self, seconds: float) -> None:
        """So much more of it is done."""
        self.done += seconds
        self.advance(min(1.0, self.done / self.seconds))

    def counted(self, progress: Progress, *, seconds: float, count: int) -> Progress:
        """A progress that counts its lines, of which a part of the work that takes `seconds` has `count`."""

        def show(line: str) -> None:
            self.add(seconds / count)
            progress(line)

        return show


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Times work to its end; it waits for a GPU, whose calls return before the work is done."""

    device: torch.device
    clock: Clock = time.perf_counter

    def seconds(self, work: Callable[[], object]) -> float:
        """The duration of one call of `work`."""
        self._wait()
        start = self.clock()
        work()
        self._wait()
        return self.clock() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            import torch  # slow to import, and unneeded by users of the clock alone

            torch.cuda.synchronize(self.device)


def read_by_torch(buffer: Tensor) -> Tensor:
    """Read all of a buffer by torch's fastest way: a sum, which is vectorised and uses all threads."""
    return buffer.sum()


class BandwidthProbe:
    """Measures how fast the device reads memory, the limit of decoding, by reading one large buffer."""

    def __init__(self, stopwatch: Stopwatch, *, read: Read = read_by_torch, num_bytes: int | None = None) -> None:
        """Allocate and touch the buffer.

        Args:
            stopwatch: times the reads.
            read: reads the buffer with the threads that also compute the forward passes, so that no other
                threads are awake while those are timed.
            num_bytes: size of the buffer, or None for a size that suits the device.
        """
        import torch

        self._stopwatch = stopwatch
        self._read = read
        size = BUFFER_BYTES[stopwatch.device.type] if num_bytes is None else num_bytes
        self._buffer = torch.ones(size // 8, dtype=torch.float64, device=stopwatch.device)

    def measure(self) -> float:
        """Bytes per second now: the best of a few reads."""
        best = min(self._stopwatch.seconds(lambda: self._read(self._buffer)) for _ in range(NUM_READS))
        return self._buffer.nbytes / best
