"""Files of a run that are whole or as they were before, whatever interrupts their writing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from forerun.errors import ConfigError
from forerun.models.checkpoint import save_tensors


def unfinished(path: Path) -> Path:
    """Where a file is written before it takes its name: one place, so that what a killed process left is written over."""
    return path.with_name(f"{path.name}.unfinished")


def write_text(path: Path, text: str) -> None:
    """Write a text file beside the one that is there, which it then replaces.

    Raises:
        ConfigError: the disk is full or gone.
    """
    with _replaced(path) as part:
        part.write_text(text, encoding="utf-8")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file beside the one that is there, which it then replaces.

    Raises:
        ConfigError: the disk is full or gone.
    """
    with _replaced(path) as part:
        save_tensors(
            {name: tensor.detach().contiguous() for name, tensor in tensors.items()}, part, metadata=dict(metadata)
        )


@contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    part = unfinished(path)
    try:
        yield part
        os.replace(part, path)
    except Exception as error:
        part.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path} ({error}); make room and give the same command again") from error
