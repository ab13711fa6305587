"""Memory for weights, in huge pages where the system has them: fewer misses of the address cache while streaming."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.kv.cache import map_memory

HUGE_PAGE = 2 << 20  # bytes
CHUNK = 256 << 20  # bytes, reserved at once; the system provides a page when it is first written to


class Arena:
    """Hands out tensors side by side in large chunks; the memory lives as long as any of them."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, aligned to a cache line."""
        size = torch.Size(shape).numel() * dtype.itemsize
        taken = -(-size // 64) * 64
        if taken > len(self._free):
            self._free = _chunk(max(CHUNK, taken))
        tensor, self._free = self._free[:size], self._free[taken:]
        return tensor.view(dtype).view(torch.Size(shape))


def _chunk(size: int) -> Tensor:
    """Bytes that begin and end with a huge page."""
    size = -(-size // HUGE_PAGE) * HUGE_PAGE
    memory = map_memory(size + HUGE_PAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return whole[-whole.data_ptr() % HUGE_PAGE :][:size]


def give_back_freed_memory() -> None:
    """Return freed memory to the system, where the C library is glibc, which keeps it otherwise.

    Weights that are read and then packed leave gaps too small for the next ones, half the size of all weights together.
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)
