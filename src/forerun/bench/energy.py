"""Measures the energy that this machine uses over a window of time: GPUs by NVML, processors and memory by RAPL.

Without a readable sensor the result is None with a reason, never zero.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple

from forerun.bench.instruments import Clock

POWERCAP = Path("/sys/class/powercap")
SAMPLE_SECONDS = 1.0  # a RAPL counter takes minutes or longer to wrap
JOULES_PER_KWH = 3.6e6

Part = Literal["gpu", "cpu", "dram"]


class Counter(NamedTuple):
    """An energy counter of one part of the machine; `read` returns joules since a fixed moment."""

    part: Part
    name: str
    method: str
    read: Callable[[], float]


@dataclass(slots=True)
class RaplDomain:
    """A powercap counter of microjoules, which wraps to 0 after `max_energy_range_uj`."""

    folder: Path
    _range: int = field(init=False)
    _last: int = field(init=False)
    _total: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._range = int((self.folder / "max_energy_range_uj").read_text())
        self._last = self._now()

    def joules(self) -> float:
        """Joules since this object was made; correct if the counter wraps at most once between calls."""
        now = self._now()
        self._total += now - self._last if now >= self._last else now - self._last + self._range
        self._last = now
        return self._total / 1e6

    def _now(self) -> int:
        return int((self.folder / "energy_uj").read_text())


def find_rapl(root: Path = POWERCAP) -> tuple[list[Counter], str | None]:
    """The counters of processor packages and memories under `root`, or none and the reason.

    The platform's counter ("psys"), which includes packages, and the counters of parts of packages are left out.
    """
    counters: list[Counter] = []
    for folder in sorted(root.glob("intel-rapl:*")):  # AMD's too
        try:
            name = (folder / "name").read_text().strip()
            part: Part | None = "cpu" if name.startswith("package") else "dram" if name == "dram" else None
            if part is not None:
                counters.append(Counter(part, f"{name} ({folder.name})", "rapl", RaplDomain(folder).joules))
        except PermissionError as error:
            return [], f"{error.filename} may be read by root only"
        except (OSError, ValueError) as error:
            return [], f"{folder} cannot be read ({error})"
    return counters, None if counters else f"no RAPL counter under {root}"


def find_gpus(visible: str | None = None) -> tuple[list[Counter], str | None]:
    """The counters of GPUs by NVML, or none and the reason.

    Args:
        visible: CUDA_VISIBLE_DEVICES, i.e. indices or UUIDs with commas between them; None for all GPUs.
    """
    try:
        import pynvml
    except ImportError:
        return [], "nvidia-ml-py is not installed (pip install 'forerun[bench]')"
    try:
        pynvml.nvmlInit()
        names = [str(index) for index in range(pynvml.nvmlDeviceGetCount())] if visible is None else visible.split(",")
        counters = [_gpu_counter(pynvml, name.strip()) for name in names if name.strip()]
    except (pynvml.NVMLError, ValueError) as error:
        return [], f"NVML: {error}"
    return counters, None if counters else "no GPU is visible"


def _gpu_counter(pynvml: Any, name: str) -> Counter:
    """A GPU's counter of millijoules since the driver was loaded, which never wraps."""
    if name.isdecimal():
        handle = pynvml.nvmlDeviceGetHandleByIndex(int(name))
    else:
        handle = pynvml.nvmlDeviceGetHandleByUUID(name)
    start = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)

    def joules() -> float:
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) - start) / 1e3

    return Counter("gpu", str(pynvml.nvmlDeviceGetName(handle)), "nvml_counter", joules)


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """Joules of each part of the machine over a window, or the reason why they are missing."""

    method: str  # "nvml_counter", "rapl", both with "+" between them, or "unavailable"
    reason: str | None  # why parts are missing
    window_s: float
    samples: int
    parts: dict[Part, float]
    idle_w: float | None
    scope: str | None

    @property
    def joules(self) -> float | None:
        """The sum over all parts, or None if none was measured."""
        return sum(self.parts.values()) if self.parts else None

    @property
    def net_joules(self) -> float | None:
        """Joules above those that the machine takes at rest, or None if one of the two was not measured."""
        return None if self.joules is None or self.idle_w is None else self.joules - self.idle_w * self.window_s

    def to_json(self, *, output_tokens: int | None, total_tokens: int | None, requests: int) -> dict[str, Any]:
        """All fields, and the gross energy per token, where their number is known, and per request."""
        joules = self.joules

        def per(count: int | None) -> float | None:
            return joules / count if joules is not None and count else None

        per_joule = output_tokens / joules if joules and output_tokens is not None else None
        return {
            "method": self.method,
            "reason": self.reason,
            "window_s": self.window_s,
            "samples": self.samples,
            "gpu_j": self.parts.get("gpu"),
            "cpu_j": self.parts.get("cpu"),
            "dram_j": self.parts.get("dram"),
            "idle_w": self.idle_w,
            "net_j": self.net_joules,
            "j_per_output_token": per(output_tokens),
            "j_per_total_token": per(total_tokens),
            "j_per_request": per(requests),
            "tokens_per_j": per_joule,
            "tokens_per_kwh": None if per_joule is None else per_joule * JOULES_PER_KWH,
            "scope": self.scope,
        }


class EnergyMeter:
    """Measures the energy of its `with` block; `energy` holds the result afterwards."""

    def __init__(
        self,
        counters: Sequence[Counter],
        reason: str | None = None,
        *,
        sample_seconds: float = SAMPLE_SECONDS,
        clock: Clock = time.perf_counter,
    ) -> None:
        """Measure by `counters`; `reason` says why some or all counters are missing."""
        self._counters = list(counters)
        self._reason = reason
        self._sample_seconds = sample_seconds
        self._clock = clock
        self._idle_watts: float | None = None
        self.energy = self._unavailable(reason or "nothing was measured", 0.0, 0)

    @classmethod
    def of_this_machine(cls, powercap: Path = POWERCAP) -> EnergyMeter:
        """A meter of all sensors of this machine that can be read."""
        gpus, no_gpus = find_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
        rapl, no_rapl = find_rapl(powercap)
        return cls([*gpus, *rapl], "; ".join(reason for reason in (no_gpus, no_rapl) if reason) or None)

    @property
    def has_sensor(self) -> bool:
        """Whether there is a counter."""
        return bool(self._counters)

    def rest(self, seconds: float, *, sleep: Callable[[float], object] = time.sleep) -> None:
        """Measure the machine's power at rest, which net energy is computed from; does nothing without a sensor."""
        if not self.has_sensor or not seconds:
            return
        with self:
            sleep(seconds)
        joules = self.energy.joules
        self._idle_watts = None if joules is None else joules / self.energy.window_s

    def __enter__(self) -> EnergyMeter:
        self._stop = threading.Event()
        self._failure: str | None = None
        self._num_samples = 0
        self._first = self._sample()
        self._started = self._clock()
        self._thread = threading.Thread(target=self._watch, name="forerun-energy", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        last, window = self._sample(), self._clock() - self._started
        self.energy = self._measured(last, window)

    def _watch(self) -> None:
        while self._counters and not self._stop.wait(self._sample_seconds):
            self._sample()

    def _sample(self) -> list[float]:
        """Joules of each counter; a failing counter makes the measurement unavailable."""
        self._num_samples += 1
        try:
            return [counter.read() for counter in self._counters]
        except Exception as error:  # NVML raises its own exception classes
            self._failure = f"a sensor failed while it ran ({type(error).__name__}: {error})"
            return []

    def _measured(self, last: list[float], window: float) -> Energy:
        if self._failure or not self._counters:
            return self._unavailable(self._failure or self._reason or "no sensor", window, self._num_samples)
        parts: dict[Part, float] = {}
        for counter, before, after in zip(self._counters, self._first, last, strict=True):
            parts[counter.part] = parts.get(counter.part, 0.0) + after - before
        unmoved = [part for part, joules in parts.items() if joules <= 0]
        if unmoved:
            reason = f"the counter of {', '.join(unmoved)} did not move in {window:.2f} s"
            return self._unavailable(reason, window, self._num_samples)
        return Energy(
            method="+".join(dict.fromkeys(counter.method for counter in self._counters)),
            reason=self._reason,
            window_s=window,
            samples=self._num_samples,
            parts=parts,
            idle_w=self._idle_watts,
            scope=", ".join(counter.name for counter in self._counters),
        )

    def _unavailable(self, reason: str, window: float, samples: int) -> Energy:
        return Energy(
            method="unavailable", reason=reason, window_s=window, samples=samples, parts={}, idle_w=None, scope=None
        )
