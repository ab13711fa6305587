"""Opens torch's libraries in a thread, while Python still imports what a command needs before torch."""

from __future__ import annotations

import ctypes
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from threading import Thread


def begin_opening() -> Thread | None:
    """Begin to open the libraries that importing torch opens first and longest, where they are shared ones of Linux.

    What cannot be opened is left to `import torch`, which says what is wrong.
    """
    found = find_spec("torch")
    if sys.platform != "linux" or found is None or found.origin is None:
        return None
    thread = Thread(target=_open_libraries, args=[Path(found.origin).parent / "lib"], daemon=True)
    thread.start()
    return thread


def _open_libraries(folder: Path) -> None:
    dlopen = ctypes.CDLL(None).dlopen  # called without Python's lock, which `ctypes.CDLL` and `import` hold meanwhile
    dlopen.argtypes, dlopen.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
    # in torch's own order and ways
    for name, mode in (("libtorch_global_deps.so", os.RTLD_GLOBAL | os.RTLD_LAZY), ("libtorch_cpu.so", os.RTLD_NOW)):
        dlopen(os.fsencode(folder / name), mode)
