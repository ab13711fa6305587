"""How fast the device reads memory: the limit of decoding, which reads all weights for each step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forerun.bench.clock import Stopwatch

BUFFER_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
"""Bytes to read, by kind of device: several times what its caches hold."""
NUM_READS = 3

Read = Callable[[Tensor], object]
"""Reads a contiguous buffer once, with all cores."""


def read_by_torch(buffer: Tensor) -> Tensor:
    """Read all of a buffer, by the fastest way that torch has: a sum, vectorised and by all threads."""
    return buffer.sum()


class BandwidthProbe:
    """Reads one large buffer with all cores, as often as it is asked."""

    def __init__(self, stopwatch: Stopwatch, *, read: Read = read_by_torch, num_bytes: int | None = None) -> None:
        """Allocate and touch the buffer.

        Args:
            stopwatch: times the reads.
            read: by the threads that compute the passes, so that no others are awake while those are timed.
            num_bytes: None: what suits the device.
        """
        self._stopwatch = stopwatch
        self._read = read
        size = BUFFER_BYTES[stopwatch.device.type] if num_bytes is None else num_bytes
        self._buffer = torch.ones(size // 8, dtype=torch.float64, device=stopwatch.device)

    def measure(self) -> float:
        """Bytes per second, of the best of a few reads: what the memory can give at this moment."""
        best = min(self._stopwatch.seconds(lambda: self._read(self._buffer)) for _ in range(NUM_READS))
        return self._buffer.nbytes / best
