"""Memory for weights, in huge pages where the system has them: fewer misses of the address cache while streaming."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from forerun.kv.cache import map_memory

HUGE_PAGE = 2 << 20  # bytes
CHUNK = 256 << 20  # bytes, reserved at once; the system provides a page when it is first written to
READ_AT_ONCE = 8 << 20  # bytes
ASKED_AT_ONCE = 32 << 20  # bytes of a mapped file
POPULATE_READ = 22  # Linux's MADV_POPULATE_READ, for which Python has no name
AREA = re.compile(r"([0-9a-f]+)-[0-9a-f]+ ")  # of memory, as /proc/self/smaps begins the lines about it
HUGE_PAGES_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


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


def map_file(stream: IO[bytes]) -> Tensor:
    """A file's bytes [size] uint8, mapped, not to be written to: of those that nobody reads none come into memory.

    Raises:
        OSError: the file cannot be mapped.
    """
    return _read_only(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))


def map_or_read(stream: IO[bytes], *, before_copying: Callable[[], object] | None = None) -> Tensor:
    """A file's bytes [size] uint8, not to be written to: mapped, or else a copy in huge pages.

    A mapped file is there at once, and processes share its memory. But many file systems have small pages only, which
    cost a pass an eighth of its time (benchmarks/start_times.py); there a copy is the better one. A copy is in memory at once,
    beside all that is still being built: what takes memory only for a while, `before_copying` waits for.

    Raises:
        OSError: the file cannot be read.
    """
    mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    whole = _read_only(mapped)
    if not _gives_huge_pages() or _is_in_huge_pages(mapped, whole.data_ptr()):
        return whole
    size = len(mapped)
    del whole, mapped  # its pages would count beside the copy's
    if before_copying is not None:
        before_copying()
    return _copy(stream.fileno(), size)


def _read_only(mapped: mmap.mmap) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapped, dtype=torch.uint8)


def _gives_huge_pages() -> bool:
    """Whether the system gives memory in huge pages to those who ask for them."""
    with suppress(OSError):
        return "[never]" not in HUGE_PAGES_SETTING.read_text()
    return False


def _is_in_huge_pages(mapped: mmap.mmap, address: int) -> bool:
    """Whether most of a mapped file lies in huge pages, after all of it was asked for.

    It is asked for in parts, of which all but the beginning is let go again. The system keeps what it has read, but pages
    count as this process's memory only once the weights are used, when all that loading needed besides is gone.
    """
    sampled = 0
    with suppress(OSError):  # the kernel is older than the advice
        mapped.madvise(mmap.MADV_HUGEPAGE)
        for begin in range(0, len(mapped), ASKED_AT_ONCE):
            length = min(ASKED_AT_ONCE, len(mapped) - begin)
            mapped.madvise(POPULATE_READ, begin, length)
            kept = min(HUGE_PAGE, length)
            sampled += kept
            if length > kept:
                mapped.madvise(mmap.MADV_DONTNEED, begin + kept, length - kept)
    return _huge_bytes(address, address + len(mapped)) > sampled // 2


def _huge_bytes(begin: int, end: int) -> int:
    """How much of a file that is mapped to these addresses is in memory in huge pages."""
    huge = 0
    inside = False
    with Path("/proc/self/smaps").open() as areas:  # by rising addresses
        for line in areas:
            if area := AREA.match(line):
                first = int(area[1], 16)
                if first >= end:
                    break
                inside = first >= begin
            elif inside and line.startswith("FilePmdMapped:"):
                huge += int(line.split()[1]) << 10
    return huge


def _copy(file: int, size: int) -> Tensor:
    """A file's bytes, read by a thread for each core."""
    whole = _chunk(size)[:size]
    content = whole.numpy().data

    def read(begin: int) -> None:
        end = min(begin + READ_AT_ONCE, size)
        while begin < end:
            num_read = os.preadv(file, [content[begin:end]], begin)
            if not num_read:
                raise OSError("the file became shorter while it was read")
            begin += num_read

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for _ in threads.map(read, range(0, size, READ_AT_ONCE)):
            pass
    return whole


def give_back_freed_memory() -> None:
    """Return freed memory to the system, where the C library is glibc, which keeps it otherwise.

    Weights that are read and then packed leave gaps too small for the next ones, half the size of all weights together.
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)
