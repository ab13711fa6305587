"""What is asked of this machine's GPUs and of the software that drives them; a fake stands in for it where there is none."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class GPU:
    """One GPU; `shared_bytes` are the most that a block of threads may share."""

    name: str
    capability: tuple[int, int]
    total_bytes: int
    shared_bytes: int

    def __str__(self) -> str:
        major, minor = self.capability
        return f"{self.name}, {self.total_bytes / 2**30:.1f} GiB, capability {major}.{minor}"


class CudaSystem(Protocol):
    """The GPUs that this process may use, and the versions that must fit each other."""

    @property
    def torch(self) -> str:
        """The version of torch."""
        ...

    @property
    def torch_cuda(self) -> str | None:
        """The version of CUDA that torch was built for; None: its build is for CPUs."""
        ...

    @property
    def driver_cuda(self) -> tuple[int, int] | None:
        """The newest version of CUDA that the driver runs; None: there is no driver."""
        ...

    @property
    def triton(self) -> str | None:
        """The version of triton; None: it is not installed."""
        ...

    @property
    def num_gpus(self) -> int:
        """How many GPUs this process sees."""
        ...

    def gpu(self, index: int) -> GPU:
        """One of these."""
        ...


class InstalledCuda:
    """What is installed here; nothing is asked of a GPU before `gpu` is called."""

    @property
    def torch(self) -> str:
        """See `CudaSystem`."""
        return str(torch.__version__)

    @property
    def torch_cuda(self) -> str | None:
        """See `CudaSystem`."""
        return torch.version.cuda

    @property
    def driver_cuda(self) -> tuple[int, int] | None:
        """See `CudaSystem`."""
        try:
            driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
            number = ctypes.c_int()
            failed = driver.cuDriverGetVersion(ctypes.byref(number))
        except (OSError, AttributeError):
            return None
        return None if failed else (number.value // 1000, number.value % 1000 // 10)

    @property
    def triton(self) -> str | None:
        """See `CudaSystem`."""
        try:
            return version("triton")
        except PackageNotFoundError:
            return None

    @property
    def num_gpus(self) -> int:
        """See `CudaSystem`."""
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def gpu(self, index: int) -> GPU:
        """See `CudaSystem`."""
        found = torch.cuda.get_device_properties(index)
        return GPU(
            name=found.name,
            capability=(found.major, found.minor),
            total_bytes=found.total_memory,
            shared_bytes=found.shared_memory_per_multiprocessor - 1024,  # which CUDA keeps for itself
        )
