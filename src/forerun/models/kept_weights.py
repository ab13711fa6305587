"""The packed weights of one model, or other tensors that are made of its files, kept from one start to the next."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from forerun.models.packed_file import PackedFile, PackedFileWriter
from forerun.ops.native.formats.base import PackedWeight

logger = logging.getLogger(__name__)

PACKED_CACHE_VARIABLE = "FORERUN_PACKED_CACHE_GB"
"""Environment variable: the most gigabytes that all kept weights may take together; 0 keeps and uses none."""

SPARE_BYTES = 1 << 30
"""That stay free on the disk."""

MOST_WAITING_BYTES = 512 << 20
"""Of weights that are packed and not yet written."""


class KeptWeights(Protocol):
    """Packed weights or tensors of one model by name, from one start to the next."""

    is_complete: bool  # all of them are there, and none need be read and packed

    def find(self, name: str) -> PackedWeight | None:
        """Return the weight of this name, or None: it must be packed."""
        ...

    def find_tensor(self, name: str) -> Tensor | None:
        """Return the tensor of this name, or None: it must be made."""
        ...

    def add(self, name: str, weight: PackedWeight | Tensor) -> None:
        """Keep a weight that has been packed, or a tensor."""
        ...


class Unkept:
    """Nothing is there, and nothing is kept."""

    is_complete = False

    def find(self, name: str) -> PackedWeight | None:  # noqa: ARG002
        """See `KeptWeights`."""
        return None

    def find_tensor(self, name: str) -> Tensor | None:  # noqa: ARG002
        """See `KeptWeights`."""
        return None

    def add(self, name: str, weight: PackedWeight | Tensor) -> None:
        """See `KeptWeights`."""


@dataclass(slots=True)
class MappedWeights:
    """All weights, in a file."""

    file: PackedFile
    is_complete: bool = field(default=True, init=False)

    def find(self, name: str) -> PackedWeight | None:
        """See `KeptWeights`."""
        return self.file[name]

    def find_tensor(self, name: str) -> Tensor | None:
        """See `KeptWeights`."""
        return self.file.tensor(name)

    def add(self, name: str, weight: PackedWeight | Tensor) -> None:
        """See `KeptWeights`: it is there already."""


class NewWeights(Unkept):
    """Weights that are packed now, and written to a file that gets its name when all of them are in it.

    A thread writes them while the next ones are packed: a disk that cannot keep up would hold all cores.
    The file is of this process alone until then, so of two processes that pack at once each writes one, and the last
    name stands. Where writing fails, that is said once, and nothing is kept; `log_level` is how loud.
    """

    def __init__(self, path: Path, *, most_bytes: int, log_level: int = logging.WARNING) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._work = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        self._log_level = log_level
        self._is_writing = True
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._waiting: deque[tuple[Future[None], int]] = deque()  # to be written, and the bytes of each
        with self._giving_up():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = self._work.open("xb")
            self._writer = PackedFileWriter(self._stream)

    def add(self, name: str, weight: PackedWeight | Tensor) -> None:
        """See `KeptWeights`."""
        num_bytes = weight.nbytes if isinstance(weight, Tensor) else weight.num_bytes
        self._wait(MOST_WAITING_BYTES - num_bytes)
        if self._is_writing:
            self._waiting.append((self._thread.submit(self._write, name, weight), num_bytes))

    def _write(self, name: str, weight: PackedWeight | Tensor) -> None:
        if self._is_writing:
            with self._giving_up():
                self._writer.add(name, weight)
                if self._writer.num_bytes > self._most_bytes:
                    raise OSError(f"they take more than {self._most_bytes / 1e9:g} GB; raise {PACKED_CACHE_VARIABLE}")
                free = shutil.disk_usage(self._work.parent).free
                if free < SPARE_BYTES:
                    raise OSError(f"{self._work.parent} has only {free / 1e9:.3g} GB left")

    def _wait(self, most_bytes: int = 0) -> None:
        """Wait until no more than so many bytes are to be written, or nothing is."""
        while self._waiting and (most_bytes <= 0 or sum(num_bytes for _, num_bytes in self._waiting) > most_bytes):
            self._waiting.popleft()[0].result()

    def finish(self, about: Mapping[str, Any]) -> bool:
        """Give the file its name, once it is on the disk; return whether there is one.

        A model that the kernels cannot compute has added nothing, and gets no file.
        """
        self._wait()
        self._thread.shutdown()
        if self._is_writing and not self._writer.num_bytes:
            self.abandon()
        if self._is_writing:
            with self._giving_up():
                self._writer.finish(about)
                self._stream.flush()
                os.fsync(self._stream.fileno())
                self._stream.close()
                self._work.replace(self._path)
        return self._is_writing

    def abandon(self) -> None:
        """Write no more, and remove what was written."""
        self._is_writing = False
        self._wait()
        self._thread.shutdown()
        self._remove()

    def _remove(self) -> None:
        self._is_writing = False
        if hasattr(self, "_stream"):
            with suppress(OSError):
                self._stream.close()
            with suppress(OSError):
                self._work.unlink()

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._remove()
            logger.log(
                self._log_level,
                "packed weights are not kept, so the next start packs them again: %s; "
                "set FORERUN_CACHE to a folder with space that you may write, or turn the cache off with %s=0",
                *(error, PACKED_CACHE_VARIABLE),
            )
