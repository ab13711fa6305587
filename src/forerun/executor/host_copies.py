"""Copies between host and device for which neither waits, and a clock of what the device does meanwhile."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The values on the device, to be read by what is queued there from now on."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def as_current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU this thread's current one, on which triton launches and events are recorded; nothing for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def free_bytes(device: torch.device) -> int:
    """The device's free memory; 0 for a CPU, of which nothing is kept account."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


class LateCopy:
    """What a tensor holds when the device comes to it, on its way to the host.

    The copy is queued behind what computes it, not on a stream of its own: it is a few kilobytes, and whatever overwrites the
    tensor comes after it. On a CPU it is a copy like any other.
    """

    def __init__(self, tensor: Tensor) -> None:
        if tensor.device.type == "cpu":
            self._host, self._ready = tensor.clone(), None
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._ready.record()

    def wait(self) -> Tensor:
        """The copy; waits until the device has made it."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._host


class StepSpan:
    """From where a step begins on the device to where it ends, by the device's own clock."""

    def __init__(self, device: torch.device) -> None:
        self._is_on_cpu = device.type == "cpu"
        self._start = self._mark()
        self._end = self._start

    def end(self) -> None:
        """Note that all of the step is queued; on a CPU, computed."""
        self._end = self._mark()

    @property
    def seconds(self) -> float:
        """What the step took; known when its results are there."""
        return self._until(self._start, self._end)

    def idle_since(self, before: StepSpan) -> float:
        """Seconds in which the device had nothing to do between an earlier step and this one; a CPU is never counted as idle."""
        return 0.0 if self._is_on_cpu else max(0.0, self._until(before._end, self._start))

    def _mark(self) -> Any:
        if self._is_on_cpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _until(self, first: Any, last: Any) -> float:
        seconds: float = last - first if self._is_on_cpu else 1e-3 * first.elapsed_time(last)
        return seconds
