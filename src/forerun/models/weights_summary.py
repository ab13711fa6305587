"""Says in a few words what a model's files hold: how many tensors of which type."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from forerun.errors import ModelError
from forerun.models.gguf.file import open_gguf
from forerun.models.gguf.types import count_types
from forerun.models.model_folder import find_gguf

HEADER_LENGTH = 8  # bytes of a safetensors file before its header
MOST_HEADER_BYTES = 100_000_000  # as safetensors has it


def describe_weights(folder: Path) -> str:
    """What is inside a model's folder or GGUF file; empty if it cannot be read, which loading explains."""
    try:
        gguf = find_gguf(folder)
        if gguf is None:
            return count_types(_safetensors_types(folder))
        return open_gguf(gguf).describe()
    except (ModelError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""


def _safetensors_types(folder: Path) -> Iterator[str]:
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(HEADER_LENGTH), "little")
            header = json.loads(stream.read(min(length, MOST_HEADER_BYTES)))
        yield from (tensor["dtype"] for name, tensor in header.items() if name != "__metadata__")
