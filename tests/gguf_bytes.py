"""GGUF files written byte by byte, so that any part of them can be wrong; and mutations of whole files."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
ALIGNMENT = 32
HOSTILE_NUMBERS = (
    0,
    1,
    2,
    7,
    255,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 40,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)


class Key(NamedTuple):
    """A key with a value of GGUF's type number `kind`; arrays have a type of their elements."""

    name: str
    kind: int
    value: Any
    element: int = 0


class Tensor(NamedTuple):
    """What the header says of a tensor; `shape` has the inputs first."""

    name: str
    shape: Sequence[int]
    kind: int = 0
    offset: int = 0


def text(value: str | bytes) -> bytes:
    """A string with its length."""
    content = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(content)) + content


def gguf_bytes(
    keys: Sequence[Key] = (),
    tensors: Sequence[Tensor] = (),
    *,
    version: int = 3,
    num_keys: int | None = None,
    num_tensors: int | None = None,
    data: bytes = b"",
) -> bytes:
    """A whole file; counts are those of the lists unless they are given."""
    header = b"GGUF" + struct.pack(
        "<IQQ",
        version,
        len(tensors) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    )
    header += b"".join(text(key.name) + struct.pack("<I", key.kind) + _value(key) for key in keys)
    header += b"".join(
        text(tensor.name)
        + struct.pack(f"<I{len(tensor.shape)}QIQ", len(tensor.shape), *tensor.shape, tensor.kind, tensor.offset)
        for tensor in tensors
    )
    return header + bytes(-len(header) % ALIGNMENT) + data


def _value(key: Key) -> bytes:
    if key.kind == ARRAY:
        parts = [_single(key.element, value) for value in key.value]
        return struct.pack("<IQ", key.element, len(parts)) + b"".join(parts)
    return _single(key.kind, key.value)


def _single(kind: int, value: Any) -> bytes:
    return text(value) if kind == STRING else struct.pack("<" + CODES[kind], value)


def mutated(content: bytes, seed: int, *, header_bytes: int) -> bytes:
    """Damage a file in its first bytes, in one to four ways: bytes, numbers, lengths, ends; the same seed the same way."""
    source = random.Random(seed)
    damaged = bytearray(content)
    for _ in range(source.randint(1, 4)):
        place = source.randrange(4, min(header_bytes, len(damaged))) if len(damaged) > 5 else 0
        way = source.randrange(6)
        if way == 0:
            damaged[place] = source.randrange(256)
        elif way in (1, 2):
            width = 4 * way
            number = source.choice(HOSTILE_NUMBERS) % (1 << 8 * width)
            damaged[place : place + width] = number.to_bytes(width, "little")
        elif way == 3:
            del damaged[place + source.randrange(len(damaged) - place) :]
        elif way == 4:
            del damaged[place : place + source.randrange(1, 64)]
        else:
            damaged[place:place] = source.randbytes(source.randrange(1, 64))
    return bytes(damaged)
