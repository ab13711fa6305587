"""The memory that the processes of a tensor-parallel group share, and how they wait for each other."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import pickle
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from ctypes import byref, c_int64
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from forerun.core.batch import MOST_CANDIDATES
from forerun.errors import ConfigError, WorkerError
from forerun.ops.cuda.failures import device_failure
from forerun.ops.native.library import Kernels
from forerun.ops.native.sharded.messages import FIRST_FREE_NUMBER, Drop
from forerun.ops.native.structs import GROUP_FLAGS_BYTES, ExchangeStruct

ALIGNMENT = 64
EXPLAINED_S = 1.0  # that the reason for a group's end may take to be known
RECEIVE_MS = 200  # after which a rank looks whether there is anything else to do


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSizes:
    """What the shared memory has room for.

    Attributes:
        num_ranks: processes of the group.
        num_threads: of each of them, by which they share out attention.
        max_rows: rows of the largest pass.
        input_width: of what a pass starts from, and of the residual stream.
        attended_width: values of all heads.
        gated_width: values of the gated MLP.
        heads_width: queries and keys of all heads, where one norm runs over all of them; else 0.
        vocab_size: the largest width of logits.
        head_rows: rows of logits that are computed at once.
        element_bytes: of a stored key.
        message_bytes: the largest message.
    """

    num_ranks: int
    num_threads: int
    max_rows: int
    input_width: int
    attended_width: int
    gated_width: int
    heads_width: int
    vocab_size: int
    head_rows: int
    element_bytes: int
    message_bytes: int

    def offsets(self) -> tuple[dict[str, int], int]:
        """Where each buffer of `ExchangeStruct` begins in the shared memory, and the bytes of all of it."""
        candidates = 2 * self.num_ranks * self.head_rows * MOST_CANDIDATES * 4
        sizes = {
            "flags": GROUP_FLAGS_BYTES,
            "message": self.message_bytes,
            "update": self.max_rows * self.input_width * 4,
            "attended": self.max_rows * self.attended_width * self.element_bytes,
            "activated": self.max_rows * self.gated_width * self.element_bytes,
            "heads": self.max_rows * self.heads_width * 4,
            "logits": 2 * self.head_rows * self.vocab_size * 4,
            "candidate_ids": candidates,
            "candidate_logits": candidates,
        }
        offsets: dict[str, int] = {}
        end = 0
        for name, size in sizes.items():
            offsets[name] = end
            end += -(-size // ALIGNMENT) * ALIGNMENT
        return offsets, end


def make_shared_memory(num_bytes: int) -> int:
    """A descriptor of memory without a name: the system takes it back when the last process that has it ends.

    Raises:
        ConfigError: the system has no such memory.
    """
    if not hasattr(os, "memfd_create"):
        raise ConfigError(
            "tensor_parallel_size: the processes share memory by memfd_create, which only Linux has; leave it out"
        )
    try:
        descriptor = os.memfd_create("forerun-tensor-parallel", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, num_bytes)
    except OSError as error:
        raise ConfigError(
            f"tensor_parallel_size: the system gives no {num_bytes / 2**20:.0f} MiB of shared memory ({error}); lower "
            "max_num_batched_tokens, or leave it out"
        ) from error
    return descriptor


class Exchange:
    """One rank's view of the shared memory."""

    def __init__(self, kernels: Kernels, descriptor: int, sizes: ExchangeSizes, *, rank: int) -> None:
        """Map the memory; the caller may close its descriptor afterwards.

        Raises:
            ConfigError: it cannot be mapped.
        """
        offsets, num_bytes = sizes.offsets()
        try:
            self._memory = mmap.mmap(descriptor, num_bytes)
        except OSError as error:
            raise ConfigError(
                f"tensor_parallel_size: {num_bytes / 2**20:.0f} MiB of shared memory cannot be mapped ({error}); lower "
                "max_num_batched_tokens, or leave it out"
            ) from error
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self._descriptor)
        self._num_bytes = num_bytes
        self.kernels = kernels
        self.sizes = sizes
        self.rank = rank
        self.struct = ExchangeStruct(
            **{name: start + offset for name, offset in offsets.items()},
            message_room=sizes.message_bytes,
            update_room=sizes.max_rows * sizes.input_width,
            max_rows=sizes.max_rows,
            head_rows=sizes.head_rows,
            rank=rank,
            num_ranks=sizes.num_ranks,
            num_threads=sizes.num_threads,
        )
        self._message_at = offsets["message"]

    def post(self, message: Any, rows: Tensor | None = None) -> None:
        """Rank 0: hand a message to the other ranks, and rows [n, width] fp32 for the pass that it asks for.

        Raises:
            ValueError: there is no room for so many rows.
            WorkerError: a rank has ended.
        """
        content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        address, count = (None, 0) if rows is None else (rows.data_ptr(), rows.numel())
        self.kernels.post(self.struct, content, len(content), address, count)

    def lend(self, contents: Sequence[bytes]) -> list[range]:
        """Rank 0: write contents behind the memory that all have mapped; returns where each is, for `borrow`."""
        places, end = [], self._num_bytes
        for content in contents:
            places.append(range(end, end + len(content)))
            with memoryview(content) as rest:
                while len(rest):
                    written = os.pwrite(self._descriptor, rest, places[-1].stop - len(rest))
                    rest = rest[written:]
            end += len(content)
        return places

    def take_back(self) -> None:
        """Rank 0: free what `lend` took, when all ranks have read it."""
        os.ftruncate(self._descriptor, self._num_bytes)

    def borrow(self, place: range) -> bytes:
        """Another rank: a copy of what rank 0 has lent."""
        parts: list[bytes] = []
        at = place.start
        while at < place.stop:
            parts.append(os.pread(self._descriptor, place.stop - at, at))
            at += len(parts[-1])
        return b"".join(parts)

    def receive(self) -> Any:
        """Another rank: the next message; None where there is none for a while.

        Raises:
            WorkerError: the group has ended.
        """
        num_bytes = c_int64()
        self.kernels.receive(self.struct, RECEIVE_MS, byref(num_bytes))
        if not num_bytes.value:
            return None
        with memoryview(self._memory) as content:
            return pickle.loads(content[self._message_at : self._message_at + num_bytes.value])

    def finish(self) -> None:
        """Another rank: the message is carried out."""
        self.kernels.finish(self.struct)

    def end(self, rank: int) -> None:
        """End the group, since `rank` is gone: every rank that waits gets a `WorkerError`."""
        self.kernels.end_group(self.struct, rank)


class Leader:
    """Rank 0's side of the group: one call at a time, from any thread.

    `reason` says why the group has ended; None as long as it runs.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.lock = threading.RLock()
        self.reason: str | None = None
        self._is_explained = threading.Event()
        self._numbers = itertools.count(FIRST_FREE_NUMBER)
        self._dropped: deque[int] = deque()

    def __enter__(self) -> Exchange:
        """Begin a call of all ranks: post a message, then compute.

        Raises:
            WorkerError: another rank has ended.
        """
        self.lock.acquire()
        try:
            while self._dropped:
                self.exchange.post(Drop(self._dropped.popleft()))
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self.exchange

    def new_number(self) -> int:
        """A number for layers, a head or a cache of which each rank has its part."""
        return next(self._numbers)

    def drop(self, number: int) -> None:
        """Let the other ranks forget a part, before their next call; from any thread, a finalizer among them."""
        self._dropped.append(number)

    def __exit__(self, kind: object, error: BaseException | None, _trace: object) -> None:
        """End the call; where it failed the others wait for a rank that does not come, so the group ends.

        Raises:
            WorkerError: another rank has ended.
        """
        self.lock.release()
        if error is None:
            return
        if isinstance(error, WorkerError):
            self.exchange.end(0)  # what is lost may be an exchange outside the shared memory
            self._is_explained.wait(EXPLAINED_S)  # a broken exchange is noticed before the end of a process
            raise WorkerError(self.end_message()) from None
        self.exchange.end(0)
        failure = device_failure(error)
        self.explain(f"rank 0 was interrupted ({type(error).__name__})" if failure is None else f"rank 0: {failure}")

    def explain(self, reason: str) -> None:
        """Say why the group has ended; the first reason stands."""
        self.reason = self.reason or reason
        self._is_explained.set()

    def check_health(self) -> None:
        """Look whether all ranks are there.

        Raises:
            WorkerError: one of them has ended.
        """
        if self.reason is not None:
            raise WorkerError(self.end_message())

    def end_message(self) -> str:
        """What to tell a user whose request meets a group that has ended."""
        return (
            f"tensor parallel: {self.reason or 'another rank has ended'}, and its part of the model with it; "
            "load the model again"
        )
