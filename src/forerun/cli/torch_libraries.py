"""Opens torch's libraries in a thread, while Python still imports what a command needs before torch."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

NUMPYS_THREADS = "OPENBLAS_NUM_THREADS"  # read when NumPy is imported

LOADED_FIRST = (
    *("asyncio", "base64", "csv", "hashlib", "heapq", "mmap", "numpy", "random", "socket", "statistics"),
    *("subprocess", "tempfile", "tokenizers", "unicodedata", "uuid"),
)
"""Modules with libraries of their own that commands import before torch: the system opens no other while it opens torch's."""

NEED_NO_TORCH = ("forerun.config.drafter_config", "forerun.engine.engine", "forerun.models.tokenizer", "tqdm.auto")
"""What an engine is made of and can be imported while torch's libraries are being opened."""


def begin_opening() -> Thread | None:
    """Begin to open the libraries that importing torch opens first and longest, where they are shared ones of Linux.

    What cannot be opened is left to `import torch`, which says what is wrong.
    """
    found = find_spec("torch")
    if sys.platform != "linux" or found is None or found.origin is None:
        return None
    with _one_thread_for_numpy():
        for name in LOADED_FIRST:
            with suppress(ImportError):  # Python may be built without some; whoever needs one says so
                importlib.import_module(name)
    from tokenizers.models import BPE

    BPE()  # the first model looks up functions of the system, for which `read_ahead` would wait
    thread = Thread(target=_open_libraries, args=[Path(found.origin).parent / "lib"], daemon=True)
    thread.start()
    return thread


def import_meanwhile() -> None:
    """Import what needs no torch, so that `import torch` finds its libraries open."""
    for name in NEED_NO_TORCH:
        importlib.import_module(name)


@contextmanager
def _one_thread_for_numpy() -> Iterator[None]:
    """Keep the threads away that NumPy's linear algebra starts at its import, which would take the core of who opens libraries.

    They wait by turning round for a tenth of a second. Commands solve small equations alone, for which one thread is enough.
    """
    if NUMPYS_THREADS in os.environ:
        yield
        return
    os.environ[NUMPYS_THREADS] = "1"
    try:
        yield
    finally:
        del os.environ[NUMPYS_THREADS]  # torch may have the same library, for large ones


def _open_libraries(folder: Path) -> None:
    dlopen = ctypes.CDLL(None).dlopen  # called without Python's lock, which `ctypes.CDLL` and `import` hold meanwhile
    dlopen.argtypes, dlopen.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
    # in torch's own order and ways
    for name, mode in (("libtorch_global_deps.so", os.RTLD_GLOBAL | os.RTLD_LAZY), ("libtorch_cpu.so", os.RTLD_NOW)):
        dlopen(os.fsencode(folder / name), mode)
