"""A model in a GGUF file, or in several that it was split into: one metadata, all tensors by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from forerun.errors import ModelError
from forerun.models.gguf.header import Header, TensorPlace, read_header
from forerun.models.gguf.metadata import Metadata
from forerun.models.gguf.types import FILE_TYPES, count_types
from forerun.models.model_folder import gguf_parts


@dataclass(frozen=True, slots=True, eq=False)
class GGUFFile:
    """A whole model: the metadata of its first part, and where each tensor lies. It is equal to itself alone."""

    path: Path
    metadata: Metadata
    tensors: Mapping[str, TensorPlace]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture."""
        return self.metadata.text("general.architecture")

    @property
    def own(self) -> Metadata:
        """The metadata of the architecture, by keys without its name."""
        return self.metadata.below(self.architecture)

    @property
    def matrix_types(self) -> frozenset[str]:
        """The names of the types of all matrices."""
        return frozenset(place.type.name for place in self.tensors.values() if len(place.shape) > 1)

    def describe(self) -> str:
        """What is inside, in a few words: "Q4_K_M: 112 tensors Q4_K, 28 Q6_K, 61 F32"."""
        mixture = FILE_TYPES.get(self.metadata.integer("general.file_type", -1), "GGUF")
        return f"{mixture}: {count_types(place.type.name for place in self.tensors.values())}"


def open_gguf(path: Path) -> GGUFFile:
    """Read the headers of a GGUF file and of all parts that belong to it.

    Any part may be named. What is read is kept until a file changes: a model's configuration, tokenizer and weights ask in turn.

    Raises:
        ModelError: a part is missing or damaged, or belongs to another model.
    """
    parts = gguf_parts(path)
    return _opened(path, tuple(parts), tuple(_version(part) for part in parts))


def _version(part: Path) -> tuple[int, int]:
    """What changes when a file is written again."""
    try:
        found = part.stat()
    except OSError:
        return 0, 0  # reading says that it is missing
    return found.st_size, found.st_mtime_ns


@lru_cache(maxsize=2)
def _opened(path: Path, parts: tuple[Path, ...], _versions: tuple[tuple[int, int], ...]) -> GGUFFile:
    for part in parts:
        if len(parts) > 1 and not part.is_file():
            raise ModelError(f"{path}: part {part.name} is missing; all {len(parts)} parts must lie in one folder")
    headers = [read_header(part) for part in parts]
    for index, (part, header) in enumerate(zip(parts, headers, strict=True)):
        _check_part(part, header.metadata, index, len(parts))
    first = headers[0].metadata
    tensors = _joined(header for header in headers)
    promised = first.integer("split.tensors.count", len(tensors))
    if len(parts) > 1 and promised != len(tensors):
        raise ModelError(
            f"{path}: its parts hold {len(tensors)} tensors, but must hold {promised}; download them again"
        )
    return GGUFFile(path, first, tensors)


def _check_part(part: Path, metadata: Metadata, index: int, count: int) -> None:
    """Check that a file is the part that its name says."""
    if count == 1 and "split.count" not in metadata:
        return
    promised = metadata.integer("split.count", 1), metadata.integer("split.no", 0)
    if count == 1 and promised[0] > 1:
        raise ModelError(
            f"{part}: is part {promised[1] + 1} of {promised[0]}; must be named like "
            f"name-{promised[1] + 1:05d}-of-{promised[0]:05d}.gguf, beside the other parts; rename the file"
        )
    if count > 1 and promised != (count, index):
        raise ModelError(
            f"{part}: holds part {promised[1] + 1} of {promised[0]}, but its name says {index + 1} of {count}; "
            "download the parts again"
        )


def _joined(headers: Iterable[Header]) -> dict[str, TensorPlace]:
    tensors: dict[str, TensorPlace] = {}
    for header in headers:
        for place in header.tensors:
            if place.name in tensors:
                raise ModelError(
                    f"{place.file}: tensor {place.name!r} is in {tensors[place.name].file.name} too; download the parts again"
                )
            tensors[place.name] = place
    return tensors
