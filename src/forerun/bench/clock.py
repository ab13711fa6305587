"""The time that work on a device takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Clock = Callable[[], float]
"""Seconds since some moment."""


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Times work to its end, on a GPU too, which returns before it is done."""

    device: torch.device
    clock: Clock = time.perf_counter

    def seconds(self, work: Callable[[], object]) -> float:
        """How long one call of `work` takes."""
        self._wait()
        start = self.clock()
        work()
        self._wait()
        return self.clock() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            import torch  # seconds of import that those who only want a clock do not need

            torch.cuda.synchronize(self.device)
