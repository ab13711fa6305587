"""Finds the build of the kernels that suits this CPU, and calls it."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from forerun.errors import ConfigError
from forerun.ops.native.structs import AttentionStruct, PassStruct, RotationStruct, WeightStruct

logger = logging.getLogger(__name__)

LEVELS = ("avx512bf16", "avx512", "avx2", "portable")
"""Builds of the kernels, best first; a CPU runs the first whose instructions it has."""

VARIABLE = "FORERUN_CPU_KERNELS"
"""Environment variable that names a level to use, or "off"."""

PROTOTYPES: dict[str, list[type]] = {
    "forerun_set_threads": [c_int32, c_void_p],
    "forerun_linear": [POINTER(WeightStruct), c_void_p, c_int64, c_int64, c_int64, c_float, c_float, c_void_p],
    "forerun_linear_argmax": [POINTER(WeightStruct), c_void_p, c_int64, c_int64, c_int64, c_float, c_float, c_void_p],
    "forerun_choose_high_bytes": [c_void_p, c_int64, c_int64, c_void_p, c_void_p],
    "forerun_code_weight": [c_void_p, c_int64, c_int64, *[c_void_p] * 4],
    "forerun_read_outputs": [POINTER(WeightStruct), c_void_p, c_int64, c_int64, c_float, c_void_p],
    "forerun_rms_norm": [c_void_p, c_void_p, c_float, c_int64, c_int64, c_void_p],
    "forerun_rotate": [c_void_p, POINTER(RotationStruct), c_int64, c_int64, c_int64],
    "forerun_gate": [c_void_p, c_void_p, c_int64, c_int32, c_void_p],
    "forerun_attention": [POINTER(PassStruct), POINTER(AttentionStruct), c_int32, *[c_void_p] * 6],
    "forerun_decoder_layers": [
        *(c_void_p, c_int64, POINTER(PassStruct), POINTER(RotationStruct), c_void_p),
        *(c_int32, c_void_p, c_void_p, c_void_p, c_void_p),
    ],
}


class Kernels:
    """One build of the kernels; its functions are those of csrc/cpu.cpp, without the prefix.

    All engines of a process share its threads, one call at a time.
    """

    def __init__(self, library: ctypes.CDLL, level: str) -> None:
        self.level = level
        for name, arguments in PROTOTYPES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        self.linear = library.forerun_linear
        self.linear_argmax = library.forerun_linear_argmax
        self.choose_high_bytes = library.forerun_choose_high_bytes
        self.code_weight = library.forerun_code_weight
        self.read_outputs = library.forerun_read_outputs
        self.rms_norm = library.forerun_rms_norm
        self.rotate = library.forerun_rotate
        self.gate = library.forerun_gate
        self.attention = library.forerun_attention
        self.decoder_layers = library.forerun_decoder_layers
        self._set_threads = library.forerun_set_threads
        self._read = library.forerun_read
        self._read.argtypes, self._read.restype = [c_void_p, c_int64], c_uint64
        self._num_threads = library.forerun_num_threads

    @property
    def reads_coded_fast(self) -> bool:
        """Whether bf16 in 12 bits (csrc/coded.h) is decoded faster than the bytes that it saves are read."""
        return self.level != "portable"

    @property
    def num_threads(self) -> int:
        """Threads that share a call."""
        return int(self._num_threads())

    def use_threads(self, num_threads: int) -> None:
        """Share calls among so many threads, each bound to a core of its own if there are as many."""
        cores = _cores()
        bound = (c_int32 * num_threads)(*cores[:num_threads]) if len(cores) >= num_threads > 1 else None
        self._set_threads(num_threads, bound)

    def read(self, buffer: Tensor) -> int:
        """Read a contiguous buffer once by all threads and do nothing with it, to measure memory bandwidth."""
        return int(self._read(buffer.data_ptr(), buffer.numel() * buffer.itemsize // 8))


def load_kernels() -> Kernels | None:
    """The best build that this CPU runs, with as many threads as torch has; None where there is none.

    Raises:
        ConfigError: the environment names a level that is unknown, not built, or not for this CPU.
    """
    wanted = os.environ.get(VARIABLE)
    if wanted == "off":
        return None
    if wanted is not None and wanted not in LEVELS:
        raise ConfigError(f"{VARIABLE}: got {wanted!r}; may be off, {', '.join(LEVELS)}")
    kernels = next(filter(None, map(kernels_of_level, LEVELS if wanted is None else [wanted])), None)
    if kernels is None and wanted is not None:
        raise ConfigError(
            f"{VARIABLE}: {wanted!r} is not built or not for this CPU; leave it unset for the best there is"
        )
    if kernels is not None and kernels.num_threads != torch.get_num_threads():
        kernels.use_threads(torch.get_num_threads())
    return kernels


@functools.cache
def kernels_of_level(level: str) -> Kernels | None:
    """One build, if it was made and this CPU runs it.

    Raises:
        ConfigError: its file is damaged, or of another version or level than it should be.
    """
    file = library_file(level)
    if not file.exists():
        return None
    try:
        library = ctypes.CDLL(str(file))
        library.forerun_level.restype = c_char_p
        found = library.forerun_level().decode()
        if found != level:
            raise OSError(f"it was built for {found}")
        return Kernels(library, level) if library.forerun_runs_here() else None
    except (OSError, AttributeError) as error:
        raise ConfigError(
            f"native CPU kernels: {file.name} cannot be used ({error}); reinstall forerun, or set {VARIABLE}=off"
        ) from error


def library_file(level: str) -> Path:
    """Where the package's build puts a level."""
    suffix = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
    return Path(__file__).with_name(f"libforerun_{level}{suffix}")


@functools.cache
def warn_if_not_built() -> None:
    """Say once what is lost where the package was built without kernels."""
    if any(library_file(level).exists() for level in LEVELS):
        return
    logger.warning(
        "the native CPU kernels are not built: decoding is slower, and in bf16 speculated text may differ from plain "
        "text at near-ties; install a C++20 compiler (g++ or clang++) and reinstall forerun"
    )


class OneTorchThread:
    """Keeps torch to the calling thread: its pool would fight the kernels' threads for the same cores."""

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        torch.set_num_threads(1)

    def __exit__(self, *_error: object) -> None:
        torch.set_num_threads(self._before)


def _cores() -> Sequence[int]:
    """One CPU number for each core that this process may use; empty where the system does not tell."""
    if sys.platform != "linux":
        return []
    allowed = os.sched_getaffinity(0)
    cores: dict[str, int] = {}
    for cpu in sorted(allowed):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(siblings.read_text() if siblings.exists() else str(cpu), cpu)
    return list(cores.values())
