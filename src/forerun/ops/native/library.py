"""The compiled kernels: loads the build that suits this CPU and calls its functions."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_float, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from torch import Tensor

from forerun.errors import ConfigError, WorkerError
from forerun.ops.native.structs import (
    INTERFACE_VERSION,
    STRUCT_SIZES,
    AttentionStruct,
    DecoderStruct,
    DraftHeadStruct,
    ExchangeStruct,
    LayerShardStruct,
    LiveTextStruct,
    PassStruct,
    RotationStruct,
    SaltContextsStruct,
    TextIndexStruct,
    WeightStruct,
)
from forerun.ops.native.threads import cores_to_bind, num_threads_to_use

logger = logging.getLogger(__name__)

LEVELS = ("amx", "avx512bf16", "avx512vnni", "avx512", "avxvnni", "avx2", "neonbf16", "neon", "portable")
"""Builds of the kernels, best first, each made for one kind of machine; a CPU runs the first whose instructions it has, unless
they are slow there and another but the last runs, too."""

KERNELS_VARIABLE = "FORERUN_CPU_KERNELS"
"""Environment variable that names a level to use, or "off"."""

PROTOTYPES: dict[str, list[type]] = {
    "set_threads": [c_int32, c_void_p],
    "linear": [
        *(POINTER(WeightStruct), c_void_p, c_int64, c_int64, c_int64, c_float, c_float, c_void_p),
        *(c_int32, c_void_p, c_void_p),
    ],
    "choose_high_bytes": [c_void_p, c_int64, c_int64, c_void_p, c_void_p],
    "code_weight": [c_void_p, c_int64, c_int64, *[c_void_p] * 4],
    "pack_blocks": [c_int32, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p],
    "round_blocks": [c_void_p, c_void_p, c_int64, c_int64, c_void_p],
    "read_outputs": [POINTER(WeightStruct), c_void_p, c_int64, c_int64, c_float, c_void_p],
    "rms_norm": [c_void_p, c_void_p, c_float, c_int64, c_int64, c_void_p],
    "rotate": [c_void_p, POINTER(RotationStruct), c_int64, c_int64, c_int64],
    "gate": [c_void_p, c_void_p, c_int64, c_int32, c_void_p],
    "attention": [POINTER(PassStruct), POINTER(AttentionStruct), c_int32, *[c_void_p] * 6],
    "decoder_layers": [
        *(c_void_p, c_int64, POINTER(PassStruct), POINTER(RotationStruct), c_void_p),
        *(c_int32, *[c_void_p] * 5),
    ],
    "decode": [
        *(POINTER(DecoderStruct), c_void_p, c_int64, POINTER(PassStruct), c_void_p, c_void_p, c_int32),
        *(c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int32, c_void_p, c_void_p, c_void_p),
    ],
    "move_slots": [c_void_p, c_int64, c_void_p, c_void_p, c_int64],
    "post": [POINTER(ExchangeStruct), c_void_p, c_int64, c_void_p, c_int64],
    "receive": [POINTER(ExchangeStruct), c_int64, POINTER(c_int64)],
    "finish": [POINTER(ExchangeStruct)],
    "end_group": [POINTER(ExchangeStruct), c_int32],
    "sharded_layers": [
        *(POINTER(ExchangeStruct), POINTER(LayerShardStruct), c_void_p, c_int64, POINTER(PassStruct)),
        *(POINTER(RotationStruct), c_void_p, c_int32, c_void_p, c_void_p, c_void_p, c_void_p),
    ],
    "sharded_head": [
        *(POINTER(ExchangeStruct), POINTER(WeightStruct), c_int64, c_int64, c_int64, c_int64),
        *(c_float, c_float, c_void_p, c_int32, c_void_p, c_void_p),
    ],
    "draft_chains": [
        *(POINTER(DraftHeadStruct), c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_void_p),
        *(c_int32, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p),
    ],
    "sample": [c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_void_p],
    "draft_loss": [c_void_p, c_void_p, c_int64, c_int64, c_int32, c_int32, c_void_p, c_void_p],
    "drafted_probs": [c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int32, c_void_p],
    "attention_gradients": [*[c_void_p] * 6, c_int64, c_int64, c_int64, c_float, *[c_void_p] * 3],
    "read": [c_void_p, c_int64, POINTER(c_uint64)],
    "find_merges": [c_void_p, c_void_p, c_void_p, c_int64, c_void_p],
    "extend_text": [POINTER(TextIndexStruct), c_void_p, c_int64],
    "settle_text": [POINTER(LiveTextStruct)],
    "take_tokens": [c_void_p, c_int64, *[c_void_p] * 4],
    "grow_drafts": [c_void_p, c_int64, *[c_void_p] * 4, c_int64, *[c_void_p] * 5],
    "learn_rows": [POINTER(SaltContextsStruct), c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p],
}
"""Arguments of the functions of csrc/cpu.cpp, without their prefix, that return a `Status`."""

ERRORS: dict[int, type[Exception]] = {1: MemoryError, 2: ConfigError, 3: ValueError, 5: WorkerError}
"""What a `Status` of csrc/cpu.cpp but 0 is raised as."""


class Kernels:
    """One build of the kernels; its functions are those of csrc/cpu.cpp, without the prefix.

    All engines of a process share its threads, one call at a time.

    Each function raises:
        MemoryError: there is not memory enough for what it computes.
        ConfigError: the system starts no more threads.
        ValueError: the sizes that it got do not fit each other.
        WorkerError: another process of the tensor-parallel group has ended.
    """

    def __init__(self, library: ctypes.CDLL, level: str) -> None:
        self.level = level
        library.forerun_message.argtypes, library.forerun_message.restype = [], c_char_p
        functions = {name: _checked(library, name, arguments) for name, arguments in PROTOTYPES.items()}
        self.linear = functions["linear"]
        self.choose_high_bytes = functions["choose_high_bytes"]
        self.code_weight = functions["code_weight"]
        self.pack_blocks = functions["pack_blocks"]
        self.round_blocks = functions["round_blocks"]
        self.read_outputs = functions["read_outputs"]
        self.rms_norm = functions["rms_norm"]
        self.rotate = functions["rotate"]
        self.gate = functions["gate"]
        self.attention = functions["attention"]
        self.decoder_layers = functions["decoder_layers"]
        self.decode = functions["decode"]
        self.move_slots = functions["move_slots"]
        self.sample = functions["sample"]
        self.draft_loss = functions["draft_loss"]
        self.drafted_probs = functions["drafted_probs"]
        self.attention_gradients = functions["attention_gradients"]
        self.find_merges = functions["find_merges"]
        self.extend_text = functions["extend_text"]
        self.settle_text = functions["settle_text"]
        self.take_tokens = functions["take_tokens"]
        self.grow_drafts = functions["grow_drafts"]
        self.learn_rows = functions["learn_rows"]
        self.draft_chains = functions["draft_chains"]
        self.post = functions["post"]
        self.receive = functions["receive"]
        self.finish = functions["finish"]
        self.end_group = functions["end_group"]
        self.sharded_layers = functions["sharded_layers"]
        self.sharded_head = functions["sharded_head"]
        self._set_threads = functions["set_threads"]
        self._read = functions["read"]
        self._num_threads = library.forerun_num_threads

    @property
    def num_threads(self) -> int:
        """Threads that share a call."""
        return int(self._num_threads())

    def use_threads(self, num_threads: int, *, cores: Sequence[int] | None = None) -> None:
        """Share calls among so many threads, each bound to a core of its own where the process has the cores to itself.

        `cores` are those to bind them to, [] for none; by default they are chosen.
        """
        cores = cores_to_bind(num_threads) if cores is None else cores
        self._set_threads(num_threads, (c_int32 * num_threads)(*cores) if cores else None)

    def read(self, buffer: Tensor) -> int:
        """Read a contiguous buffer once by all threads and do nothing with it, to measure memory bandwidth."""
        total = c_uint64()
        self._read(buffer.data_ptr(), buffer.numel() * buffer.itemsize // 8, byref(total))
        return total.value


def _checked(library: ctypes.CDLL, name: str, arguments: list[type]) -> Callable[..., Any]:
    """A function of the library that raises what its status says."""

    def check(status: int, _function: object, _arguments: object) -> None:
        if status:
            raise ERRORS.get(status, RuntimeError)(f"native CPU kernels: {name}: {library.forerun_message().decode()}")

    function: Any = library[f"forerun_{name}"]
    function.argtypes, function.restype, function.errcheck = arguments, c_int32, check
    checked: Callable[..., Any] = function
    return checked


def load_kernels() -> Kernels | None:
    """The best build that this CPU runs, with as many threads as torch has and control groups allow; None if no build runs.

    Raises:
        ConfigError: the environment names a level that is unknown, not built, or not for this CPU.
    """
    kernels = best_kernels()
    if kernels is not None and kernels.num_threads != (num_threads := num_threads_to_use()):
        kernels.use_threads(num_threads)
    return kernels


def best_kernels() -> Kernels | None:
    """The best build that this CPU runs, with the threads that it has: one, where no model computes on it; None if no build runs.

    Raises:
        ConfigError: as `load_kernels`.
    """
    wanted = os.environ.get(KERNELS_VARIABLE)
    if wanted == "off":
        return None
    if wanted is not None and wanted not in LEVELS:
        raise ConfigError(f"{KERNELS_VARIABLE}: got {wanted!r}; may be off, {', '.join(LEVELS)}")
    *levels, last = LEVELS
    levels = [*sorted(levels, key=is_slow_here), last] if wanted is None else [wanted]
    kernels = next(filter(None, map(kernels_of_level, levels)), None)
    if kernels is None and wanted is not None:
        raise ConfigError(
            f"{KERNELS_VARIABLE}: {wanted!r} is not built or not for this CPU; leave it unset for the best there is"
        )
    return kernels


@functools.cache
def kernels_of_level(level: str) -> Kernels | None:
    """One build, if it was made and this CPU runs it.

    Raises:
        ConfigError: its file is damaged, or of another version or level than it should be.
    """
    if not library_file(level).exists() or not runs_here(level):
        return None
    library = _loaded(level)
    with _named(level):
        _refuse_if_stale(library, level)
        return Kernels(library, level)


def runs_here(level: str) -> bool:
    """Whether this CPU has the instructions of a level. A build must not even be loaded where it has not.

    Raises:
        ConfigError: the library that knows is not there or damaged.
    """
    return _ask_processor("runs_here", level)


@functools.cache
def is_slow_here(level: str) -> bool:
    """Whether a level is built, and this CPU does what it computes sooner with the instructions of a later one.

    Raises:
        ConfigError: as `runs_here`.
    """
    return library_file(level).exists() and _ask_processor("is_slow_here", level)


def _ask_processor(question: str, level: str) -> bool:
    processor = _loaded("processor")
    with _named("processor"):
        return bool(processor[f"forerun_{question}"](level.encode()))


def _loaded(name: str) -> ctypes.CDLL:
    with _named(name):
        return ctypes.CDLL(str(library_file(name)))


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Say which library cannot be used, and what to do."""
    try:
        yield
    except (OSError, AttributeError) as error:
        raise ConfigError(
            f"native CPU kernels: {library_file(name).name} cannot be used ({error}); reinstall forerun, or set {KERNELS_VARIABLE}=off"
        ) from error


def _refuse_if_stale(library: ctypes.CDLL, level: str) -> None:
    """Raise `OSError` where a library was built from other sources than this Python was written for, or for another level."""
    version = library.forerun_interface_version() if hasattr(library, "forerun_interface_version") else 0
    if version != INTERFACE_VERSION:
        raise OSError(f"its interface is of version {version}, not {INTERFACE_VERSION}")
    library.forerun_size_of.argtypes, library.forerun_size_of.restype = [c_char_p], c_int64
    for name, size in STRUCT_SIZES.items():
        found = library.forerun_size_of(name.encode())
        if found != size:
            raise OSError(f"its {name} has {found} bytes, not {size}")
    library.forerun_level.restype = c_char_p
    if (found_level := library.forerun_level().decode()) != level:
        raise OSError(f"it was built for {found_level}")


def library_file(name: str) -> Path:
    """Where the package's build puts a level, or `processor`, which says what this CPU runs."""
    suffix = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
    return Path(__file__).with_name(f"libforerun_{name}{suffix}")


@functools.cache
def warn_if_not_built() -> None:
    """Say once what is lost where the package was built without kernels."""
    if any(library_file(level).exists() for level in LEVELS):
        return
    logger.warning(
        "the native CPU kernels are not built: decoding is slower, and in bf16 speculated text may differ from plain "
        "text at near-ties; install a C++20 compiler (g++ or clang++) and reinstall forerun"
    )
