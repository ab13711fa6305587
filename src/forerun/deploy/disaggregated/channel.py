"""Messages between two processes of one machine: a JSON header, and tensors in shared memory that has no name.

The memory goes with the message as a descriptor, so the system takes it back when neither process has it any more,
however they end. A thread reads what comes, so that neither process ever waits for the other to read.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

LENGTH_BYTES = 8
ALIGNMENT = 64
SEND_TIMEOUT_S = 10  # the other end's thread reads at once, unless its process is stopped


class Message(NamedTuple):
    """What one process says to the other; `error` says why its tensors have not come, where they have not."""

    header: dict[str, Any]
    tensors: tuple[Tensor, ...] = ()
    error: str | None = None


class Channel:
    """One end of a connection.

    Args:
        connection: a connected Unix stream socket, which the channel takes over.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))
        self._socket = connection
        self._inbox: SimpleQueue[Message | None] = SimpleQueue()
        self._sending = threading.Lock()
        self._is_over = False
        threading.Thread(target=self._read, name="forerun-channel", daemon=True).start()

    @classmethod
    def of_descriptor(cls, descriptor: int) -> Channel:
        """The end whose socket this process has inherited."""
        return cls(socket.socket(fileno=descriptor))

    def send(self, header: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        """Say something; the tensors are copied into shared memory.

        Raises:
            OSError: there is no memory or descriptor for the tensors; or the other end is closed or does not read, and
                then this one is closed too, since a message may be cut.
        """
        shapes = [[str(one.dtype).removeprefix("torch."), list(one.shape)] for one in tensors]
        content = json.dumps({"header": dict(header), "tensors": shapes}).encode()
        descriptors = [_shared(tensors)] if tensors else []
        try:
            with self._sending:
                socket.send_fds(self._socket, [len(content).to_bytes(LENGTH_BYTES, "little")], descriptors)
                self._socket.sendall(content)
        except BaseException:  # an interrupt, too
            self._end()
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def receive(self, timeout: float | None = None) -> Message | None:
        """The next message; None where none comes within `timeout` seconds (None: ever).

        Raises:
            EOFError: the other end is closed.
        """
        if self._is_over:
            raise EOFError
        try:
            message = self._inbox.get(timeout=timeout) if timeout != 0 else self._inbox.get_nowait()
        except Empty:
            return None
        if message is None:
            self._is_over = True
            raise EOFError
        return message

    def close(self) -> None:
        """Close this end; the other one notices."""
        self._end()
        self._socket.close()

    def _end(self) -> None:
        with suppress(OSError):  # the other end has gone first
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        try:
            with suppress(OSError, EOFError):  # it is closed
                while True:
                    self._inbox.put(self._read_one())
        finally:
            self._inbox.put(None)

    def _read_one(self) -> Message:
        length, descriptors, _, _ = socket.recv_fds(self._socket, LENGTH_BYTES, 1)
        try:
            length += self._exactly(LENGTH_BYTES - len(length)) if length else b""
            if not length:
                raise EOFError
            content = json.loads(self._exactly(int.from_bytes(length, "little")))
            if not content["tensors"]:
                return Message(content["header"])
            try:
                return Message(content["header"], _mapped(descriptors, content["tensors"]))
            except OSError as error:  # the channel is well: what follows may find memory and descriptors again
                return Message(content["header"], error=str(error))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _exactly(self, num_bytes: int) -> bytes:
        parts: list[bytes] = []
        while num_bytes:
            part = self._socket.recv(num_bytes)
            if not part:
                raise EOFError
            parts.append(part)
            num_bytes -= len(part)
        return b"".join(parts)


def _shared(tensors: Sequence[Tensor]) -> int:
    """A descriptor of shared memory with copies of the tensors, one after the other."""
    descriptor = os.memfd_create("forerun-kv", os.MFD_CLOEXEC)
    try:
        sizes = [_padded(one.nbytes) for one in tensors]
        os.ftruncate(descriptor, max(sum(sizes), 1))
        with mmap.mmap(descriptor, max(sum(sizes), 1)) as memory:
            whole = torch.frombuffer(memory, dtype=torch.uint8)
            begin = 0
            for one, size in zip(tensors, sizes, strict=True):
                whole[begin : begin + one.nbytes] = one.contiguous().flatten().view(torch.uint8)
                begin += size
            del whole  # else the memory could not be unmapped
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _mapped(descriptors: Sequence[int], shapes: Sequence[Any]) -> tuple[Tensor, ...]:
    """The tensors in shared memory, which is unmapped when the last of them is gone.

    Raises:
        OSError: it cannot be mapped, or its descriptor was dropped, since this process has as many as it may.
    """
    if not descriptors:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    (descriptor,) = descriptors
    num_bytes = os.fstat(descriptor).st_size
    whole = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
    found: list[Tensor] = []
    begin = 0
    for name, shape in shapes:
        dtype: torch.dtype = getattr(torch, name)
        size = math.prod(shape) * dtype.itemsize
        found.append(whole[begin : begin + size].view(dtype).view(shape))
        begin += _padded(size)
    return tuple(found)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
