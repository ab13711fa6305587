"""Says in a few words what a model's files hold: how many tensors of which type."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from forerun.errors import ModelError
from forerun.models.gguf.file import open_gguf
from forerun.models.gguf.types import count_types
from forerun.models.model_folder import find_gguf, read_safetensors_header


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
        yield from (tensor["dtype"] for tensor in read_safetensors_header(file).values())
