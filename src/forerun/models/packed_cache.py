"""The cache of packed weights: what one start packs, later ones map.

It is a folder of files, one for each model, weight format and level of the kernels. A file's name ends in a digest of
all that its content depends on, so that a file which fits no more is not found. It goes when room is needed, the least
recently used first, or by `forerun models prune`.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

from torch import Tensor

import forerun
from forerun.core.cache_folder import cache_folder
from forerun.core.writable import nearest_existing, write_refusal
from forerun.errors import ConfigError
from forerun.models.fingerprint import WEIGHTS, samples_of
from forerun.models.kept_weights import (
    PACKED_CACHE_VARIABLE,
    SPARE_BYTES,
    KeptWeights,
    MappedWeights,
    NewWeights,
    Unkept,
)
from forerun.models.model_folder import CONFIG_FILE, gguf_parts
from forerun.models.packed_file import PackedFile, PackedFileError, read_table
from forerun.ops.native.memory import map_or_read

logger = logging.getLogger(__name__)

DEFAULT_GB = 32.0
SUFFIX = ".packed"
LEAST_BYTES = 32 << 20  # of a model's files: less is packed as soon as mapped
ABANDONED_SECONDS = 3600.0  # since the last write to a file that has not got its name yet
PACKAGE = Path(forerun.__file__).parent
CODE_FOLDERS = ("models", "ops")  # of the package: they say what is packed, and how


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedModel:
    """What packed weights are of: a model's files at `path`, a format and a level of the kernels.

    The pieces of a tokenizer are kept likewise, under a format of their own.
    """

    path: Path
    format: str
    level: str
    dtype: str

    def key(self) -> dict[str, Any]:
        """All that the packed weights depend on, and where the model and the code are, as JSON.

        So of two copies of a model each has a file of its own, which goes when its copy has gone.
        """
        return {
            "path": str(_place(self.path)),
            "package": str(PACKAGE),
            "source": _identity(self.path),
            "format": self.format,
            "level": self.level,
            "dtype": self.dtype,
            "code": _code(self.level),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedFile:
    """A file that was removed."""

    name: str
    num_bytes: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCache:
    """The folder, and how much may be in it.

    folder: of the files. most_bytes: of all of them together; 0: the cache is not used. least_bytes: of a model's own
    files; smaller models are not kept.
    """

    folder: Path
    most_bytes: int
    least_bytes: int = LEAST_BYTES

    @classmethod
    def of_environment(cls) -> PackedCache:
        """The cache of this user.

        Raises:
            ConfigError: the environment variable is no size.
        """
        given = os.environ.get(PACKED_CACHE_VARIABLE) or DEFAULT_GB
        try:
            most_bytes = int(float(given) * 1e9)
        except (ValueError, OverflowError):
            most_bytes = -1
        if most_bytes < 0:
            raise ConfigError(f"{PACKED_CACHE_VARIABLE}: got {given!r}; must be a number of gigabytes, 0 for no cache")
        return cls(folder=cache_folder() / "packed", most_bytes=most_bytes)

    @contextmanager
    def weights(
        self,
        model: PackedModel,
        *,
        expected_bytes: int | None = None,
        read: Callable[[IO[bytes]], Tensor] = map_or_read,
        log_level: int = logging.WARNING,
    ) -> Iterator[KeptWeights]:
        """The kept weights of a model, or a place to keep them.

        What was added is kept if no error ends the block, and the model's files have not changed meanwhile.
        `expected_bytes` is about what will be kept, None: as much as the model's own files have; nothing is begun that has
        no room. `read` brings a file of kept weights into memory. `log_level` is how loud it is said that nothing can be kept.
        """
        files = _weight_files(model.path)
        num_bytes = sum(file.stat().st_size for file in files)
        if not self.most_bytes or num_bytes < self.least_bytes:
            yield Unkept()
            return
        key = model.key()
        path = self.folder / _file_name(model, key)
        found = _open(path, key, read)
        if found is not None:
            yield MappedWeights(found)
            return
        if not self._has_room(num_bytes if expected_bytes is None else expected_bytes, log_level):
            yield Unkept()
            return
        new = NewWeights(path, most_bytes=self.most_bytes, log_level=log_level)
        try:
            yield new
        except BaseException:
            new.abandon()
            raise
        if _has_changed(model, key):
            new.abandon()
            logger.log(
                log_level,
                "what was packed is not kept: the files of %s changed while they were read; start again when nothing writes them",
                model.path,
            )
        elif new.finish({"key": key}):
            self._make_room(path)

    def prune(self, *, everything: bool = False) -> list[PrunedFile]:
        """Remove files that no start can use any more, or all of them.

        Raises:
            OSError: a file cannot be removed.
        """
        removed: list[PrunedFile] = []
        for path in (*self._files(), *self._works()):
            reason, status = "all are removed" if everything else _uselessness(path), _status(path)
            if reason is not None and status is not None:  # else another process has removed it
                path.unlink(missing_ok=True)
                removed.append(PrunedFile(name=path.name, num_bytes=status.st_size, reason=reason))
        return removed

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return _num_bytes(self._files()) + self.num_unfinished_bytes

    @property
    def num_unfinished_bytes(self) -> int:
        """Bytes of files that have not got their names yet: they are being written, or their processes were killed."""
        return _num_bytes(self._works())

    def _has_room(self, num_bytes: int, log_level: int) -> bool:
        """Whether the cache and its disk have room for about so many bytes; said where they have not."""
        if num_bytes > self.most_bytes:
            logger.log(
                log_level,
                "packed weights are not kept, so the next start packs them again: they take about %.3g GB, the cache at most %g; "
                "raise %s, or turn the cache off with %s=0",
                *(num_bytes / 1e9, self.most_bytes / 1e9, PACKED_CACHE_VARIABLE, PACKED_CACHE_VARIABLE),
            )
            return False
        folder = nearest_existing(self.folder)
        free = shutil.disk_usage(folder).free
        if free >= num_bytes + SPARE_BYTES:
            return True
        if (refusal := write_refusal(folder)) is not None:  # a disk that takes no files has no room either
            logger.log(
                log_level,
                "packed weights are not kept, so the next start packs them again: %s cannot be made or written (%s: %s); "
                "set FORERUN_CACHE to a folder with space that you may write, or turn the cache off with %s=0",
                *(self.folder, folder, refusal, PACKED_CACHE_VARIABLE),
            )
            return False
        logger.log(
            log_level,
            "packed weights are not kept, so the next start packs them again: they take about %.3g GB beside %.3g that stay "
            "free, and %s has only %.3g; make room (forerun models prune), set FORERUN_CACHE to a folder with space, or turn the cache "
            "off with %s=0",
            *(num_bytes / 1e9, SPARE_BYTES / 1e9, folder, free / 1e9, PACKED_CACHE_VARIABLE),
        )
        return False

    def _make_room(self, newest: Path) -> None:
        """Remove what the newest replaces and what killed processes left, then the least recently used until the others fit."""
        with suppress(OSError):
            alike = self.folder.glob(f"{glob.escape(newest.name.rpartition('-')[0])}-*{SUFFIX}")
            for path in (*filter(partial(_replaces, newest), alike), *filter(_uselessness, self._works())):
                _remove(path)
            found = [(path, status) for path in self._files() if (status := _status(path)) is not None]
            surplus = sum(status.st_size for _, status in found) - self.most_bytes
            for path, status in sorted(found, key=lambda one: one[1].st_mtime):
                if surplus > 0 and path != newest and _remove(path):
                    surplus -= status.st_size

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob(f"[!.]*{SUFFIX}"))

    def _works(self) -> list[Path]:
        """Files that have not got their names yet."""
        return sorted(self.folder.glob(f".*{SUFFIX}.*"))


def _open(path: Path, key: Mapping[str, Any], read: Callable[[IO[bytes]], Tensor]) -> PackedFile | None:
    """A file of packed weights, noted as used now; None where there is none, or it is damaged or of another key."""
    if not os.path.exists(path):  # nor may the folder be searched: Path.exists would raise that
        return None
    try:
        if read_table(path)["about"]["key"] != key:
            return None
        found = PackedFile(path, read=read)
    except (OSError, PackedFileError) as error:
        logger.warning("what was packed cannot be used, and is packed again: %s", error)
        return None
    with suppress(OSError):  # a folder that may only be read
        os.utime(path)
    return found


def _has_changed(model: PackedModel, key: Mapping[str, Any]) -> bool:
    """Whether a model's files are no more those of this key."""
    try:
        return model.key() != key
    except OSError:  # one is gone
        return True


def _status(path: Path) -> os.stat_result | None:
    """What the system says of a file; None where another process has removed it."""
    with suppress(OSError):
        return path.stat()
    return None


def _num_bytes(paths: Iterable[Path]) -> int:
    return sum(status.st_size for status in map(_status, paths) if status is not None)


def _remove(path: Path) -> bool:
    """Remove a file; whether it could be, for another process may have, and each one is tried."""
    with suppress(OSError):
        path.unlink()
        return True
    return False


def _uselessness(path: Path) -> str | None:
    """Why no start can use a file of the folder; None if one can, or nobody can tell."""
    if path.name.startswith("."):
        status = _status(path)
        is_abandoned = status is not None and time.time() - status.st_mtime > ABANDONED_SECONDS
        return "it was never finished" if is_abandoned else None
    try:
        key = read_table(path)["about"]["key"]
        source = Path(key["path"])
        if not source.exists():
            return f"its model is gone: {source}"
        if key["code"] != _code(key["level"]):
            return "it is of another version of forerun"
        return None if key["source"] == _identity(source) else f"its model has changed: {source}"
    except (PackedFileError, KeyError):
        return "it is damaged, or of another version of forerun"
    except OSError:  # another process has removed it, or it or its model may not be read
        return None


def _replaces(newest: Path, path: Path) -> bool:
    """Whether a file is of the same model as the newest, before the model's own files or the code changed."""
    try:
        new, old = (read_table(file)["about"]["key"] for file in (newest, path))
        is_upgraded = new["package"] == old["package"] and new["code"] != old["code"]
        return bool(new["path"] == old["path"] and (new["source"] != old["source"] or is_upgraded))
    except (OSError, PackedFileError, KeyError):
        return False


def _file_name(model: PackedModel, key: Mapping[str, Any]) -> str:
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", _place(model.path).name).lstrip(".")[:80]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return f"{name}-{model.format}-{model.level}-{digest}{SUFFIX}"


def _place(path: Path) -> Path:
    """Where a model is, whichever way leads there: a folder, or a file under its own name, the first of its parts."""
    return path.resolve() if path.is_dir() else path.parent.resolve() / gguf_parts(path)[0].name


def _weight_files(path: Path) -> list[Path]:
    """The files of a model's weights; of a GGUF that is split, all parts."""
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.suffix in WEIGHTS and file.is_file())
    return [part for part in gguf_parts(path) if part == path or part.exists()]


def _identity(path: Path) -> dict[str, Any]:
    """Which weights and configuration a model has: sizes, times and samples of its files, as JSON."""
    files = {
        file.name: [file.stat().st_size, file.stat().st_mtime_ns, samples_of(file).hex()]
        for file in _weight_files(path)
    }
    config = path / CONFIG_FILE
    if config.exists():
        files[CONFIG_FILE] = [hashlib.sha256(config.read_bytes()).hexdigest()]
    return files


@cache
def _code(level: str) -> str:
    """A digest of the code that packs: its version, and names, sizes and times of its files, the built kernels among them."""
    digest = hashlib.sha256(f"{forerun.__version__} {level}".encode())
    for folder in CODE_FOLDERS:
        for file in sorted((PACKAGE / folder).rglob("*.*")):
            if file.suffix == ".py" or f"libforerun_{level}." in file.name:
                status = file.stat()
                digest.update(f"{file.relative_to(PACKAGE)} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()
