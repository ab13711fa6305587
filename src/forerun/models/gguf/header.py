"""Reads the header of a GGUF file: metadata, and where each tensor lies.

A file may come from anybody. Counts, lengths, dimensions and offsets are checked against the file's size before they are
used, and nothing is kept in memory but keys, single values and places: arrays, which hold the vocabulary, are read when
they are asked for (`Metadata`).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from forerun.errors import ModelError, one_line
from forerun.models.gguf.metadata import Metadata, StoredArray
from forerun.models.gguf.types import TENSOR_TYPES, TensorType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_KEYS = 1 << 14
MOST_TENSORS = 1 << 16
MOST_KEY_BYTES = 1 << 10
MOST_NAME_BYTES = 1 << 8
MOST_TEXT_BYTES = 1 << 24  # of all single strings together; a chat template has some thousands
MOST_ELEMENTS = 1 << 24  # of all arrays of strings together, which have to be walked
MOST_DIMENSIONS = 4
LEAST_KEY_BYTES = 8 + 4 + 1  # an empty key's length, its value's type and a value of one byte
LEAST_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # an empty name's length, one dimension, type and offset
ALIGNMENTS = tuple(1 << power for power in range(3, 17))
DEFAULT_ALIGNMENT = 32

STRING, ARRAY, BOOL = 8, 9, 7
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "?", 10: "Q", 11: "q", 12: "d"}
"""struct's codes of the types of single values."""

LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies: its shape (outputs first, as torch has it), type, and bytes [start, start + num_bytes) of `file`."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    file: Path
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """What the header of one file says."""

    metadata: Metadata
    tensors: tuple[TensorPlace, ...]


class _DamagedError(Exception):
    """Says what is wrong with a file, without its name."""


def read_header(file: Path) -> Header:
    """Read and check the header of one GGUF file.

    Raises:
        ModelError: the file is missing, not GGUF, of another version, damaged or truncated.
    """
    if not file.is_file():
        raise ModelError(f"{file}: there is no such file; check the path")
    try:
        with file.open("rb") as stream:
            if stream.read(len(MAGIC)) != MAGIC:
                raise ModelError(f"{file}: not a GGUF file (its first bytes are not 'GGUF'); download it again")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _Parser(file, content).header()
    except _DamagedError as error:
        raise ModelError(f"{file}: damaged GGUF ({error}); download it again") from error
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({one_line(error)}); check the file") from error


class _Parser:
    """Reads one file from its beginning on, and never beyond its end."""

    def __init__(self, file: Path, content: mmap.mmap) -> None:
        self._file = file
        self._content = content
        self._size = len(content)
        self._position = len(MAGIC)
        self._text_left = MOST_TEXT_BYTES
        self._elements_left = MOST_ELEMENTS

    def header(self) -> Header:
        (version,) = self._numbers("I")
        if version not in VERSIONS:
            self._refuse_version(version)
        num_tensors, num_keys = self._numbers("QQ")
        self._check_count("keys", num_keys, MOST_KEYS, LEAST_KEY_BYTES)
        self._check_count("tensors", num_tensors, MOST_TENSORS, LEAST_TENSOR_BYTES)
        values: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string("a key", MOST_KEY_BYTES)
            if key in values:
                raise _DamagedError(f"key {key!r:.80} is there twice")
            values[key] = self._value(key)
        alignment = values.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment not in ALIGNMENTS:
            raise _DamagedError(
                f"general.alignment: got {alignment!r:.80}; must be a power of two from {ALIGNMENTS[0]} to {ALIGNMENTS[-1]}"
            )
        infos = [self._tensor_info() for _ in range(num_tensors)]
        data = -(-self._position // alignment) * alignment
        return Header(Metadata(self._file, values), self._placed(infos, data, alignment))

    def _refuse_version(self, version: int) -> NoReturn:
        if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
            raise ModelError(
                f"{self._file}: got a big-endian GGUF file; must be little-endian; convert the original model"
            )
        raise ModelError(
            f"{self._file}: got GGUF version {version}; may be {', '.join(map(str, VERSIONS))}; convert the original model"
        )

    def _check_count(self, what: str, count: int, most: int, least_bytes: int) -> None:
        if count > most or count * least_bytes > self._size - self._position:
            raise _DamagedError(
                f"it promises {count} {what}, more than {self._size} bytes or this format's use can hold"
            )

    def _bytes(self, count: int) -> int:
        """Step over bytes; return where they began."""
        start = self._position
        if count > self._size - start:
            raise _DamagedError(f"the header goes on after the file's end, at byte {self._size}")
        self._position = start + count
        return start

    def _numbers(self, codes: str) -> tuple[Any, ...]:
        form = struct.Struct("<" + codes)
        return form.unpack_from(self._content, self._bytes(form.size))

    def _string(self, what: str, most: int) -> str:
        (length,) = self._numbers("Q")
        if length > most:
            raise _DamagedError(f"{what:.80} has {length} bytes; must have at most {most}")
        start = self._bytes(length)
        try:
            return self._content[start : start + length].decode()
        except UnicodeDecodeError:
            raise _DamagedError(f"{what:.80} at byte {start} is not UTF-8") from None

    def _value(self, key: str) -> Any:
        (kind,) = self._numbers("I")
        if kind in NUMBERS:
            return self._numbers(NUMBERS[kind])[0]
        if kind == STRING:
            text = self._string(f"the text of key {key!r}", self._text_left)
            self._text_left -= len(text.encode())
            return text
        if kind == ARRAY:
            return self._array(key)
        raise _DamagedError(f"key {key!r:.80} is of the unknown type {kind}")

    def _array(self, key: str) -> StoredArray:
        """Step over an array; its elements are read where they are used."""
        kind, count = self._numbers("IQ")
        if kind in NUMBERS:
            start = self._bytes(count * struct.calcsize("<" + NUMBERS[kind]))
            return StoredArray(NUMBERS[kind], count, start, self._position)
        if kind != STRING:
            raise _DamagedError(f"key {key!r:.80} is an array of type {kind}; may be numbers or strings")
        self._elements_left -= count
        if self._elements_left < 0 or count * LENGTH.size > self._size - self._position:
            raise _DamagedError(
                f"key {key!r:.80} promises {count} strings, more than {self._size} bytes or a vocabulary hold"
            )
        return StoredArray("s", count, self._position, self._over_strings(count))

    def _over_strings(self, count: int) -> int:
        """Step over strings; return where they end."""
        length_at, content, position, last = LENGTH.unpack_from, self._content, self._position, self._size - LENGTH.size
        for _ in range(count):
            if position > last:
                break
            position += LENGTH.size + length_at(content, position)[0]
        else:
            self._bytes(position - self._position)
            return position
        raise _DamagedError(f"a string goes on after the file's end, at byte {self._size}")

    def _tensor_info(self) -> tuple[str, tuple[int, ...], TensorType, int]:
        """Name, shape, type, and offset in the data that follow the header."""
        name = self._string("a tensor's name", MOST_NAME_BYTES)
        (num_dimensions,) = self._numbers("I")
        if not 1 <= num_dimensions <= MOST_DIMENSIONS:
            raise _DamagedError(
                f"tensor {name!r:.80} has {num_dimensions} dimensions; must have 1 to {MOST_DIMENSIONS}"
            )
        dimensions = self._numbers("Q" * num_dimensions)
        kind, offset = self._numbers("IQ")
        if kind not in TENSOR_TYPES:
            raise ModelError(
                f"{self._file}: tensor {name!r:.80} is of the unknown type {kind}; may be "
                f"{', '.join(known.name for known in TENSOR_TYPES.values())}; convert the original model again"
            )
        return name, dimensions[::-1], TENSOR_TYPES[kind], offset

    def _placed(
        self, infos: Iterable[tuple[str, tuple[int, ...], TensorType, int]], data: int, alignment: int
    ) -> tuple[TensorPlace, ...]:
        """Check that all tensors are whole, aligned and apart from each other."""
        places: dict[str, TensorPlace] = {}
        for name, shape, kind, offset in infos:
            if name in places:
                raise _DamagedError(f"tensor {name!r:.80} is there twice")
            if 0 in shape or shape[-1] % kind.weights:
                raise _DamagedError(f"tensor {name!r:.80} of type {kind.name} has the impossible shape {list(shape)}")
            num_bytes = prod(shape) // kind.weights * kind.bytes
            if offset % alignment:
                raise _DamagedError(f"tensor {name!r:.80} begins at {offset}, no multiple of {alignment}")
            if data + offset + num_bytes > self._size:
                raise _DamagedError(
                    f"tensor {name!r:.80} ends at byte {data + offset + num_bytes}, after the file's end at {self._size}"
                )
            places[name] = TensorPlace(name, shape, kind, self._file, data + offset, num_bytes)
        _check_apart(places.values())
        return tuple(places.values())


def _check_apart(places: Iterable[TensorPlace]) -> None:
    end, before = 0, ""
    for place in sorted(places, key=lambda place: place.start):
        if place.start < end:
            raise _DamagedError(f"tensors {before!r:.80} and {place.name!r:.80} overlap")
        end, before = place.start + place.num_bytes, place.name
