"""Files of packed weights: written while a model is packed, and mapped at later starts.

A file holds the tensors one after the other, each at a multiple of 64 bytes, then a table of contents in JSON, then a
trailer: where the table is, and its SHA-256. A file that was cut off anywhere has no such trailer.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from forerun.ops.native.formats import STORED_FORMATS
from forerun.ops.native.formats.base import PackedWeight
from forerun.ops.native.memory import HUGE_PAGE, map_or_read

MAGIC = b"forerunP"
TRAILER = struct.Struct("<8sQQ32s")  # magic; offset, length and SHA-256 of the table
ALIGNMENT = 64  # bytes: a cache line, as the kernels want it


class PackedFileError(Exception):
    """A file is not one of packed weights, or not whole."""


class PackedFileWriter:
    """Writes weights by name as they come, and the table at the end.

    It writes a huge page at a time, so that file systems which have huge pages keep the file in such, ready to be mapped.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._page = bytearray()  # not written yet
        self._offset = 0
        self._weights: dict[str, Any] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights so far."""
        return self._offset

    def add(self, name: str, weight: PackedWeight | Tensor) -> None:
        """Write a weight, or a tensor that is none.

        Raises:
            OSError: it cannot be written.
        """
        self._weights[name] = _record(weight, self._write)

    def finish(self, about: Mapping[str, Any]) -> None:
        """Write the table, with what the file is `about` (JSON).

        Raises:
            OSError: it cannot be written.
        """
        table = json.dumps({"about": about, "weights": self._weights}).encode()
        self._stream.write(self._page)
        self._stream.write(table)
        self._stream.write(TRAILER.pack(MAGIC, self._offset, len(table), hashlib.sha256(table).digest()))

    def _write(self, tensor: Tensor) -> int:
        """Write a tensor's bytes and return where they begin."""
        place = self._offset
        content = tensor.contiguous().flatten().view(torch.uint8).numpy()
        self._put(content.data)
        self._put(memoryview(bytes(-content.nbytes % ALIGNMENT)))
        return place

    def _put(self, content: memoryview) -> None:
        self._offset += len(content)
        while len(content):
            part = content[: HUGE_PAGE - len(self._page)]
            self._page += part
            content = content[len(part) :]
            if len(self._page) == HUGE_PAGE:
                self._stream.write(self._page)
                self._page.clear()


class PackedFile:
    """The weights of a file, in memory that the file is mapped to or was read into."""

    def __init__(self, path: Path, *, read: Callable[[IO[bytes]], Tensor] = map_or_read) -> None:
        """Read the table, and let `read` bring the file into memory.

        Raises:
            PackedFileError: it is none, or not whole.
            OSError: it cannot be read.
        """
        table = read_table(path)
        with path.open("rb") as stream:
            self._bytes = read(stream)
        self._weights: dict[str, Any] = table["weights"]

    def __getitem__(self, name: str) -> PackedWeight:
        """The weight of this name.

        Raises:
            KeyError: there is none.
        """
        weight: PackedWeight = _weight(self._weights[name], self._tensor)
        return weight

    def tensor(self, name: str) -> Tensor:
        """The tensor of this name, which is no packed weight.

        Raises:
            KeyError: there is none.
        """
        return self._tensor(self._weights[name])

    def _tensor(self, record: Mapping[str, Any]) -> Tensor:
        dtype: torch.dtype = getattr(torch, record["dtype"])
        shape = torch.Size(record["shape"])
        begin = record["offset"]
        content = self._bytes[begin : begin + shape.numel() * dtype.itemsize]
        return content.view(dtype).view(shape)


def read_table(path: Path) -> dict[str, Any]:
    """The table of a file: `about` and `weights`.

    Raises:
        PackedFileError: it is no file of packed weights, or not whole.
        OSError: it cannot be read.
    """
    with path.open("rb") as stream:
        size = stream.seek(0, 2)
        if size < TRAILER.size:
            raise PackedFileError(f"{path}: has only {size} bytes")
        stream.seek(size - TRAILER.size)
        magic, offset, length, digest = TRAILER.unpack(stream.read(TRAILER.size))
        if magic != MAGIC or offset + length + TRAILER.size != size:
            raise PackedFileError(f"{path}: is cut off, or no file of packed weights")
        stream.seek(offset)
        content = stream.read(length)
    if hashlib.sha256(content).digest() != digest:
        raise PackedFileError(f"{path}: its table of contents is damaged")
    table: dict[str, Any] = json.loads(content)
    return table


def _record(value: Any, write: Callable[[Tensor], int]) -> Any:
    """A field of a weight, or a weight, as JSON; tensors are written, and their places noted."""
    if isinstance(value, Tensor):
        shape, dtype = list(value.shape), str(value.dtype).removeprefix("torch.")
        return {"offset": write(value), "shape": shape, "dtype": dtype}
    if isinstance(value, PackedWeight):
        stored = (field.name for field in fields(value) if field.init and field.name != "format")
        return {"format": value.format.name} | {name: _record(getattr(value, name), write) for name in stored}
    if isinstance(value, tuple):
        return [_record(item, write) for item in value]
    if value is None or isinstance(value, (int, float, str)):
        return value
    raise TypeError(f"a packed weight holds a {type(value).__name__}, which files of packed weights know nothing of")


def _weight(record: Any, tensor: Callable[[Mapping[str, Any]], Tensor]) -> Any:
    """The twin of `_record`."""
    if isinstance(record, dict) and "format" in record:
        content = {name: _weight(value, tensor) for name, value in record.items() if name != "format"}
        return PackedWeight(format=STORED_FORMATS[record["format"]], **content)
    if isinstance(record, dict):
        return tensor(record)
    if isinstance(record, list):
        return tuple(_weight(item, tensor) for item in record)
    return record
