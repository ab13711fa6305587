"""Finds the energy counters of this machine: GPUs by NVML, processor packages and memory by RAPL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

POWERCAP = Path("/sys/class/powercap")

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
