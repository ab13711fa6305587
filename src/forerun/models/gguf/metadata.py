"""The metadata of a GGUF file: values by key, with their types checked; arrays are read from the file when asked for."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from forerun.errors import ModelError

MOST_STRINGS = 1 << 20
"""That are read at once: the largest vocabularies have a quarter million tokens, and half a million merges in 11 MB."""

MOST_STRING_BYTES = 1 << 24
MOST_ARRAY_BYTES = 1 << 26  # of numbers
LENGTH = struct.Struct("<Q")  # of a string, before it
WHOLE_NUMBERS = "bBhHiIqQ"  # struct's codes

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array that lies in bytes [start, end) of the file: `code` is struct's of its elements, "s" for strings."""

    code: str
    count: int
    start: int
    end: int


class Metadata:
    """Values by key, of those whose keys begin with `prefix`."""

    def __init__(self, file: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.file = file
        self._values = values
        self._prefix = prefix

    def __contains__(self, key: str) -> bool:
        """Return whether there is a value under this key."""
        return self._prefix + key in self._values

    @property
    def num_elements(self) -> int:
        """The number of elements of all arrays together."""
        return sum(value.count for value in self._values.values() if isinstance(value, StoredArray))

    def below(self, prefix: str) -> Metadata:
        """The values whose keys begin with `prefix` and a dot, by the rest of the key."""
        return Metadata(self.file, self._values, f"{self._prefix}{prefix}.")

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number of 0 or more.

        Raises:
            ModelError: it is missing and there is no default, or it is something else; so in all methods.
        """
        found = self._get(key, default)
        if type(found) is not int or (found < 0 and found != default):
            raise self._wrong(key, "a whole number")
        return found

    def integer_of_layers(self, key: str, default: int | None = None) -> int:
        """A whole number that stands there once, or for each layer, if it is the same for all."""
        found = self._values.get(self._prefix + key)
        if isinstance(found, StoredArray) and found.code in WHOLE_NUMBERS and found.count:
            by_layer = self.numbers(key)
            if by_layer[0] >= 0 and (by_layer == by_layer[0]).all():
                return int(by_layer[0])
        return self.integer(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        found = self._get(key, default)
        if type(found) not in (int, float) or not np.isfinite(found):
            raise self._wrong(key, "a number")
        return float(found)

    def flag(self, key: str, default: bool) -> bool:
        """True or False."""
        found = self._get(key, default)
        if type(found) is not bool:
            raise self._wrong(key, "true or false")
        return found

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        found = self._get(key, default)
        if type(found) is not str:
            raise self._wrong(key, "a text")
        return found

    def count(self, key: str) -> int:
        """The number of elements of an array."""
        return self._array(key).count

    def places(self, key: str, wanted: Iterable[str]) -> dict[str, int]:
        """Where each of the wanted strings, of 1 to 255 bytes, lies in an array of strings; of those that it has."""
        array = self._array(key)
        if array.code != "s" or array.end - array.start > MOST_STRING_BYTES:
            raise self._wrong(key, f"an array of strings in {MOST_STRING_BYTES} bytes")
        content = self._read(array)
        sought = {word.encode() for word in wanted}
        last = _last_place(content, sought)  # nothing is to be found after it
        found: dict[str, int] = {}
        position, index = 0, 0
        while position < last and index < array.count:
            begin = position + LENGTH.size
            position = begin + LENGTH.unpack_from(content, position)[0]
            if content[begin:position] in sought:
                found.setdefault(content[begin:position].decode(), index)
            index += 1
        return found

    def strings(self, key: str) -> list[str]:
        """An array of strings; bytes that are not UTF-8 become U+FFFD."""
        array = self._array(key)
        if array.code != "s" or array.count > MOST_STRINGS or array.end - array.start > MOST_STRING_BYTES:
            raise self._wrong(key, f"an array of at most {MOST_STRINGS} strings in {MOST_STRING_BYTES} bytes")
        content = self._read(array)
        length_at, width = LENGTH.unpack_from, LENGTH.size
        found, position = [], 0
        for _ in range(array.count):
            begin = position + width
            position = begin + length_at(content, position)[0]
            found.append(content[begin:position].decode(errors="replace"))
        return found

    def numbers(self, key: str) -> np.ndarray:
        """An array of numbers, in the file's type."""
        array = self._array(key)
        if array.code == "s" or array.end - array.start > MOST_ARRAY_BYTES:
            raise self._wrong(key, f"an array of numbers in at most {MOST_ARRAY_BYTES} bytes")
        return np.frombuffer(self._read(array), dtype="<" + array.code)

    def is_array(self, key: str) -> bool:
        """Whether there is an array under this key."""
        return isinstance(self._values.get(self._prefix + key), StoredArray)

    def _array(self, key: str) -> StoredArray:
        found = self._get(key, None)
        if not isinstance(found, StoredArray):
            raise self._wrong(key, "an array")
        return found

    def _get(self, key: str, default: Value | None) -> Value | Any:
        found = self._values.get(self._prefix + key, default)
        if found is None:
            raise ModelError(
                f"{self.file}: metadata has no {self._prefix}{key}; download the file again, or convert the original model"
            )
        return found

    def _read(self, array: StoredArray) -> bytes:
        with self.file.open("rb") as stream:
            stream.seek(array.start)
            content = stream.read(array.end - array.start)
        if len(content) < array.end - array.start:
            raise ModelError(f"{self.file}: was cut off while it was read; download it again")
        return content

    def _wrong(self, key: str, expected: str) -> ModelError:
        found = self._values.get(self._prefix + key)
        got = f"an array of {found.count}" if isinstance(found, StoredArray) else f"{found!r:.80}"
        return ModelError(
            f"{self.file}: metadata {self._prefix}{key}: got {got}; must be {expected}; convert the original model again"
        )


def _last_place(content: bytes, sought: Collection[bytes]) -> int:
    """Where the last of the sought strings may begin, or -1: behind its length, whose upper bytes are zero."""
    values = np.frombuffer(content, np.uint8)
    lasts = [-1]
    for first in {word[0] for word in sought if word}:
        begins = LENGTH.size + np.flatnonzero((values[LENGTH.size :] == first) & (values[LENGTH.size - 1 : -1] == 0))
        ends = begins + values[begins - LENGTH.size]
        lasts += [
            begin for begin, end in zip(begins.tolist(), ends.tolist(), strict=True) if content[begin:end] in sought
        ]
    return max(lasts)
