"""A file of texts as token ids, to which records are only ever added: what is whole in it outlives any interruption."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from forerun.errors import ConfigError

MAGIC = b"FTXT"
HEADER = struct.Struct("<4sIIIIf")
"""Magic, CRC-32 of all that follows it in the record, number, tokens, spans, temperature; then spans and tokens, uint32 each."""

CHECKED_FROM = 8  # byte of a record where what the checksum covers begins

Span = tuple[int, int]
"""Places [start, end) of a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenText:
    """A conversation, with the places that the target wrote.

    `number` says which conversation of the run it is. One that came to nothing has no tokens: its number is spent.
    """

    number: int
    temperature: float
    token_ids: NDArray[np.uint32]
    spans: tuple[Span, ...]

    @property
    def num_written(self) -> int:
        """Tokens that the target wrote."""
        return sum(end - start for start, end in self.spans)


def read_texts(path: Path) -> list[WrittenText]:
    """Read the whole records of a file, which another process may be adding to.

    Raises:
        OSError: it cannot be read.
    """
    return _parse(path.read_bytes())[0]


class TextFile:
    """Reads a file of texts and adds to it.

    A record that was cut off, as by a full disk or a killed process, and all behind it is dropped on opening.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, or make it.

        Raises:
            ConfigError: it cannot be read or written.
        """
        self._path = path
        try:
            content = path.read_bytes() if path.exists() else b""
            self.texts, self._end = _parse(content)
            self.num_written = sum(text.num_written for text in self.texts)  # tokens of answers
            self._stream: BinaryIO = path.open("ab")
            if self._end < len(content):
                self._stream.truncate(self._end)
        except OSError as error:
            raise ConfigError(f"cannot open {path} ({error}); give a folder that can be written") from error

    def append(self, text: WrittenText) -> None:
        """Add a text; it is the file's as soon as this returns.

        Raises:
            ConfigError: the disk is full or gone; what was in the file before is still whole.
        """
        record = _record(text)
        try:
            self._stream.write(record)
            self._stream.flush()
        except OSError as error:
            self._undo()
            raise ConfigError(
                f"cannot write {self._path} ({error}); make room and give the same command again: it goes on here"
            ) from error
        self._end += len(record)
        self.texts.append(text)
        self.num_written += text.num_written

    def close(self) -> None:
        """Close the file."""
        try:
            self._stream.close()
        except OSError:  # the rest of a record that did not fit, which is cut off by the next to open it
            return

    def __enter__(self) -> TextFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _undo(self) -> None:
        """Cut off what was written of a record."""
        try:
            os.truncate(self._path, self._end)
        except OSError:  # whoever opens the file next drops it
            return


def _record(text: WrittenText) -> bytes:
    spans = np.asarray(text.spans, dtype="<u4").reshape(-1)
    body = spans.tobytes() + text.token_ids.astype("<u4").tobytes()
    header = HEADER.pack(MAGIC, 0, text.number, len(text.token_ids), len(text.spans), text.temperature)
    checksum = zlib.crc32(header[CHECKED_FROM:] + body)
    return MAGIC + struct.pack("<I", checksum) + header[CHECKED_FROM:] + body


def _parse(content: bytes) -> tuple[list[WrittenText], int]:
    """Return the texts of the whole records at the beginning of a file, and the byte where those end."""
    texts: list[WrittenText] = []
    place = 0
    while place + HEADER.size <= len(content):
        magic, checksum, number, num_tokens, num_spans, temperature = HEADER.unpack_from(content, place)
        end = place + HEADER.size + 4 * (num_tokens + 2 * num_spans)
        if magic != MAGIC or end > len(content) or zlib.crc32(content[place + CHECKED_FROM : end]) != checksum:
            break
        values = np.frombuffer(content, dtype="<u4", count=num_tokens + 2 * num_spans, offset=place + HEADER.size)
        texts.append(
            WrittenText(
                number=number,
                temperature=temperature,
                token_ids=values[2 * num_spans :],
                spans=_pairs(values[: 2 * num_spans].tolist()),
            )
        )
        place = end
    return texts, place


def _pairs(values: Sequence[int]) -> tuple[Span, ...]:
    return tuple(zip(values[::2], values[1::2], strict=True))
