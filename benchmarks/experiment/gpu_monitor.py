"""Monitors power, utilisation and memory of the GPUs during a run, with the keys of the original's monitor.

Units are watts, joules and percent.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

MILLI = 1e-3
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of one GPU at one moment; memory in MiB, clocks in MHz, energy in joules since a fixed moment."""

    timestamp: float
    gpu_id: int
    power_draw: float
    power_limit: float
    utilization_gpu: float
    utilization_memory: float
    memory_used: int
    memory_total: int
    temperature: float
    clock_graphics: int
    clock_memory: int
    energy: float | None


TakeSnapshot = Callable[[int], Snapshot]
"""Returns the present state of the GPU of an index."""


def find_gpus() -> tuple[list[int], TakeSnapshot | None, str | None]:
    """The GPUs that NVML knows, a function that takes snapshots of them, and the reason if there are none."""
    try:
        import pynvml
    except ImportError:
        return [], None, "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        return [], None, f"NVML: {error}"
    return list(range(count)), lambda gpu: _take_snapshot(pynvml, gpu), None if count else "there is no GPU"


def _take_snapshot(pynvml: Any, gpu: int) -> Snapshot:
    handle = pynvml.nvmlDeviceGetHandleByIndex(gpu)
    busy, memory = pynvml.nvmlDeviceGetUtilizationRates(handle), pynvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        energy = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) * MILLI
    except pynvml.NVMLError:  # before Volta
        energy = None
    return Snapshot(
        timestamp=time.time(),
        gpu_id=gpu,
        power_draw=pynvml.nvmlDeviceGetPowerUsage(handle) * MILLI,
        power_limit=pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) * MILLI,
        utilization_gpu=busy.gpu,
        utilization_memory=busy.memory,
        memory_used=memory.used // MIB,
        memory_total=memory.total // MIB,
        temperature=pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
        clock_graphics=pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_GRAPHICS),
        clock_memory=pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
        energy=energy,
    )


class GpuMonitor:
    """Takes a snapshot of every GPU each `interval` seconds of its `with` block."""

    def __init__(
        self, gpus: Sequence[int], take_snapshot: TakeSnapshot | None, reason: str | None, *, interval: float
    ) -> None:
        self._gpus = list(gpus)
        self._take_snapshot = take_snapshot
        self._interval = interval
        self.reason = reason
        self.snapshots: list[Snapshot] = []
        self.start_time = self.end_time = 0.0

    def __enter__(self) -> GpuMonitor:
        self.start_time = time.time()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpu-monitor", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()
        self.end_time = time.time()

    def _watch(self) -> None:
        while self._take_snapshot and self.reason is None:
            self._sample()
            if self._stop.wait(self._interval):
                return

    def _sample(self) -> None:
        """Take a snapshot of all GPUs; a failure ends the monitoring, since a sum without one GPU would be wrong."""
        if self._take_snapshot is None or self.reason is not None:
            return
        try:
            self.snapshots += [self._take_snapshot(gpu) for gpu in self._gpus]
        except Exception as error:  # NVML raises its own exception classes
            self.reason = f"a GPU could not be read ({type(error).__name__}: {error})"
            self.snapshots.clear()

    def to_json(self, *, tokens: int, accepted: int, requests: int) -> dict[str, Any]:
        """The original's keys, with null where nothing was measured, and the reason for that."""
        by_gpu = {str(gpu): [one for one in self.snapshots if one.gpu_id == gpu] for gpu in self._gpus}
        seen = {gpu: looks for gpu, looks in by_gpu.items() if looks}

        def each(value: Callable[[list[Snapshot]], float]) -> dict[str, float] | None:
            return {gpu: value(looks) for gpu, looks in seen.items()} if seen else None

        energy = each(joules)
        total = sum(energy.values()) if energy else None
        per_joule = tokens / total if total else None
        accepted_per_joule = accepted / total if total else None
        return {
            "gpu_ids": self._gpus,
            "duration": self.end_time - self.start_time,
            "start_time": self.start_time,
            "end_time": self.end_time,
            "total_energy_consumed": energy,
            "total_energy_all_gpus": total,
            "average_power": each(lambda looks: statistics.fmean(one.power_draw for one in looks)),
            "peak_power": each(lambda looks: max(one.power_draw for one in looks)),
            "average_utilization": each(lambda looks: statistics.fmean(one.utilization_gpu for one in looks)),
            "average_memory_usage": each(
                lambda looks: statistics.fmean(100 * one.memory_used / one.memory_total for one in looks)
            ),
            "peak_temperature": each(lambda looks: max(one.temperature for one in looks)),
            "total_tokens_generated": tokens,
            "total_tokens_accepted": accepted,
            "total_requests": requests,
            "tokens_per_joule": per_joule,
            "tokens_accepted_per_joule": accepted_per_joule,
            "tokens_per_kwh": None if per_joule is None else per_joule * 3.6e6,
            "tokens_accepted_per_kwh": None if accepted_per_joule is None else accepted_per_joule * 3.6e6,
            "snapshots": [asdict(one) for one in self.snapshots],
            "reason": self.reason,
        }


def joules(looks: Sequence[Snapshot]) -> float:
    """Energy by the GPU's counter if it has one, else the integral of power over the snapshots (trapezoids)."""
    first, last = looks[0].energy, looks[-1].energy
    if first is not None and last is not None:
        return last - first
    return sum(
        (a.power_draw + b.power_draw) / 2 * (b.timestamp - a.timestamp) for a, b in zip(looks, looks[1:], strict=False)
    )
