"""Files of pools: what drafters remember of past requests, for one model, kept from one process to the next.

A file is in the safetensors format: plain arrays of little-endian numbers behind a JSON header, from which nothing
is ever executed. A checksum over all of it tells a damaged file. It holds texts of users and their cache salts, so
only its owner may read it.
"""

from __future__ import annotations

import json
import os
import zlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from forerun.core.whole_file import whole_file
from forerun.drafters.base import PoolArrays
from forerun.errors import ForerunError

FORMAT = "forerun-pools-1"
"""Raised when the meaning of the arrays changes, so that older files are told apart."""

Sections = Mapping[str | None, PoolArrays]
"""Cache salt -> arrays of one kind of pool; the salt used for longest ago comes first."""


class PoolFileError(ForerunError):
    """A file of pools is damaged, or is none, or belongs to another model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """The model whose tokens and habits the pools hold."""

    fingerprint: str  # of its weights and vocabulary
    name: str  # for people; it may change


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPools:
    """The contents of a file: by kind of pool, as in `KeepsPools`, what it keeps of each salt."""

    model: ModelIdentity
    kinds: Mapping[str, Sections]

    @property
    def shared(self) -> SavedPools:
        """The part that was learnt from requests without a cache salt."""
        kinds: dict[str, Sections] = {
            kind: {None: sections[None]} for kind, sections in self.kinds.items() if None in sections
        }
        return replace(self, kinds=kinds)


def write_pools(path: Path, pools: SavedPools) -> None:
    """Write a file, whole or not at all (see `whole_file`); only its owner may read it.

    Raises:
        OSError: it cannot be written. The file that was there before is left as it was.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    salts: dict[str, list[str | None]] = {}
    for kind, sections in pools.kinds.items():
        salts[kind] = list(sections)
        for number, section in enumerate(sections.values()):
            arrays |= {f"{kind}/{number}/{name}": np.ascontiguousarray(array) for name, array in section.items()}
    contents = json.dumps({"fingerprint": pools.model.fingerprint, "name": pools.model.name, "salts": salts})
    metadata = {"format": FORMAT, "contents": contents, "checksum": _checksum(contents, arrays)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as part, open(part, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as stream:
        stream.write(save(arrays, metadata))
        stream.flush()
        if part.is_file():
            os.fsync(stream.fileno())


def read_pools(path: Path) -> SavedPools:
    """Read a file.

    Raises:
        PoolFileError: it is not there, cannot be read, is damaged, or is none; the message names it.
    """
    is_ours = False
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise PoolFileError(
                    f"{path}: got format {metadata.get('format')!r:.40}; must be {FORMAT!r}; "
                    "it is no file of pools, or one of another version"
                )
            is_ours = True
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        if metadata["checksum"] != _checksum(metadata["contents"], arrays):
            raise PoolFileError(f"{path}: damaged: its checksum is not that of its contents; delete it")
        contents = json.loads(metadata["contents"])
        model = ModelIdentity(fingerprint=str(contents["fingerprint"]), name=str(contents["name"]))
        sections: defaultdict[str, dict[str, npt.NDArray[Any]]] = defaultdict(dict)
        for full_name, array in arrays.items():
            section, _, name = full_name.rpartition("/")
            sections[section][name] = array
        kinds = {
            str(kind): {salt: sections[f"{kind}/{number}"] for number, salt in enumerate(salts)}
            for kind, salts in contents["salts"].items()
        }
    except FileNotFoundError as error:
        raise PoolFileError(f"{path}: there is no such file") from error
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        advice = "; delete it" if is_ours else ""
        raise PoolFileError(f"{path}: no file of pools that can be read ({error}){advice}") from error
    return SavedPools(model=model, kinds=kinds)


def put_aside(path: Path) -> Path:
    """Rename a file that cannot be used, so that another can be written in its place; return where it lies now.

    Raises:
        OSError: it cannot be renamed; FileNotFoundError: it is not there.
    """
    return path.replace(path.with_suffix(".unusable"))


def check_model(path: Path, found: ModelIdentity, wanted: ModelIdentity) -> None:
    """Raise `PoolFileError` unless a file's pools are of the wanted model."""
    if found.fingerprint != wanted.fingerprint:
        raise PoolFileError(
            f"{path}: holds pools of another model, {found.name} ({found.fingerprint[:12]}); "
            f"must be of {wanted.name} ({wanted.fingerprint[:12]}): weights or tokenizer differ"
        )


def file_of(folder: Path, model: ModelIdentity) -> Path:
    """Where a model's pools lie in a folder, which may hold those of many models."""
    return folder / f"{model.fingerprint[:16]}.pools"


def _checksum(contents: str, arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    """CRC-32 over the contents and the arrays' names and bytes, little-endian as in the file."""
    checksum = zlib.crc32(contents.encode())
    for name in sorted(arrays):
        array = arrays[name]
        checksum = zlib.crc32(name.encode(), checksum)
        checksum = zlib.crc32(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes(), checksum)
    return f"{checksum:08x}"
