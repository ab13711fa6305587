"""Memory straight from the system."""

from __future__ import annotations

import mmap

# Shared memory, which is mmap's default, is given huge pages on few systems.
PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


def map_memory(num_bytes: int) -> mmap.mmap:
    """Zeros, of this process alone, which the system gives page by page as they are first written to."""
    return mmap.mmap(-1, num_bytes, **PRIVATE)
