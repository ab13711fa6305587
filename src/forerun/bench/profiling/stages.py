"""The folder of a profile while it is measured: each finished stage is kept, so that an interrupted one goes on."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from forerun.core.held_folder import LOCK_FILE, held_folder
from forerun.core.writable import check_writable_folder
from forerun.errors import ConfigError
from forerun.plan.dynamo_files import DECODE_FILE, PREFILL_FILE
from forerun.plan.profile import PROFILE_FILE, SPECULATION_FILE, TRACES_FOLDER, write_json

T = TypeVar("T")

STAGES = "stages"
IDENTITY_FILE = "identity.json"
SECONDS = "seconds"
"""The record of what all stages took, beside theirs."""

RECORDING_FILE, SWEEP_FILE, PAGE_FILE = "recording.jsonl.gz", "sweep.csv", "profile.html"

FILES = (
    *(STAGES, RECORDING_FILE, TRACES_FOLDER, SWEEP_FILE, PAGE_FILE, SPECULATION_FILE),
    *(PREFILL_FILE.parts[0], DECODE_FILE.parts[0], "decode_k[0-9]*", "mocker_k[0-9]*.npz"),
    PROFILE_FILE,
)
"""What a profile's folder may have, as patterns; the file that says that it is whole comes last."""


def digest(prompts: Sequence[Any]) -> str:
    """Some prompts, texts or token ids, in a few letters: other prompts have others."""
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Stages:
    """Results by stage, as JSON files in a folder; made by `open_stages` or `held_stages`.

    `started` is the moment at which this piece of the measurement began, `seconds_before` what earlier pieces took.
    """

    folder: Path
    started: float = field(default_factory=time.monotonic)
    seconds_before: float = 0.0

    @property
    def seconds(self) -> float:
        """What the stages have taken, all pieces of an interrupted profile together."""
        return self.seconds_before + time.monotonic() - self.started

    def path(self, name: str) -> Path:
        """The file of a stage."""
        return self.folder / STAGES / f"{name}.json"

    def get(self, name: str) -> Any | None:
        """What a stage found, or None if it has not ended.

        Raises:
            ConfigError: its file is damaged.
        """
        path = self.path(name)
        if not path.is_file():
            return None
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} is damaged ({error}); delete it, and it is made anew") from None

    def load(self, name: str, parse: Callable[[Any], T]) -> T | None:
        """What a stage found, made of its record, or None if it has not ended.

        Raises:
            ConfigError: its file is damaged.
        """
        record = self.get(name)
        if record is None:
            return None
        try:
            return parse(record)
        except (ConfigError, KeyError, TypeError, ValueError, AttributeError) as error:
            why = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"{self.path(name)} is damaged ({why}); delete it, and it is made anew") from None

    def keep(self, name: str, record: Mapping[str, Any]) -> None:
        """Keep what a stage found, and what all have taken by then."""
        write_json(self.path(name), record)
        write_json(self.path(SECONDS), {"seconds": self.seconds})

    def names(self) -> list[str]:
        """The stages that have ended; not what a killed process left half written, which has one more ending."""
        files = (self.folder / STAGES).glob("*.json")
        found = {path.stem for path in files if path.suffixes == [".json"] and path.name != IDENTITY_FILE}
        return sorted(found - {SECONDS})


def check_folder(folder: Path, *, overwrite: bool = False, goes_on: bool = True) -> None:
    """Refuse a folder that a profile could not be written to; before anything is loaded.

    Args:
        folder: of the profile.
        overwrite: begin anew, whatever is there.
        goes_on: an unfinished profile goes on; False: what is written would spoil it.

    Raises:
        ConfigError: it cannot be written, or has a finished profile, one that does not go on, or other files.
    """
    check_writable_folder("--output-dir", folder)
    if overwrite:
        return
    if (folder / PROFILE_FILE).is_file():
        raise ConfigError(f"--output-dir: {folder} has a profile already; give another folder, or --overwrite")
    if not goes_on and is_begun(folder):
        raise ConfigError(
            f"--output-dir: {folder} has an unfinished profile, which would be lost; give another folder, or --overwrite"
        )
    others = [path for path in folder.iterdir() if path.name != LOCK_FILE] if folder.is_dir() else []
    if others and not (folder / STAGES).is_dir():
        raise ConfigError(
            f"--output-dir: {folder} has other files; give a new folder, or --overwrite to write beside them"
        )


def is_begun(folder: Path) -> bool:
    """Whether a folder has a profile that goes on when it is measured again."""
    return (folder / STAGES).is_dir() and not (folder / PROFILE_FILE).is_file()


def delete_profile(folder: Path) -> None:
    """Delete the profile of a folder, finished or not, and nothing that lies beside it.

    Raises:
        ConfigError: a file cannot be deleted.
    """
    if not (folder / PROFILE_FILE).is_file() and not (folder / STAGES / IDENTITY_FILE).is_file():
        return
    for path in [path for pattern in FILES for path in folder.glob(pattern)]:
        try:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        except OSError as error:
            raise ConfigError(
                f"--output-dir: cannot delete {path} of the earlier profile ({error.strerror}); give another folder"
            ) from None


def begun_identity(folder: Path) -> dict[str, Any] | None:
    """What the measurement in a folder depends on; None where none was begun.

    Raises:
        ConfigError: the file that says so is damaged.
    """
    path = folder / STAGES / IDENTITY_FILE
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"got a {type(found).__name__} for an object")
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}); give another folder, or --overwrite") from None
    return found


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """What differs between two records: its name, behind those of the records that it is in, and both values."""
    for name in {**here, **there}:
        one, other = there.get(name), here.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            yield from ((f"{name}.{part}", first, second) for part, first, second in differences(one, other))
        elif one != other:
            yield name, one, other


def open_stages(
    folder: Path, identity: Mapping[str, Any], *, overwrite: bool = False, started: float | None = None
) -> Stages:
    """Begin a profile's folder, or go on with one of the same measurement.

    Args:
        folder: is made if it is not there.
        identity: what the stages depend on: model, machine, version, what is measured.
        overwrite: begin anew, whatever is there; an earlier profile is deleted.
        started: the moment at which the measurement began, by the monotonic clock; None: now.

    Raises:
        ConfigError: the folder has a finished profile, stages of another measurement, or other files.
    """
    check_folder(folder, overwrite=overwrite)
    if overwrite:
        delete_profile(folder)
    began = Stages(folder) if started is None else Stages(folder, started)
    found = begun_identity(folder)
    if found is None:
        (folder / STAGES).mkdir(parents=True, exist_ok=True)
        write_json(folder / STAGES / IDENTITY_FILE, identity)
        return began
    for name, there, here in differences(found, json.loads(json.dumps(identity))):
        raise ConfigError(
            f"--output-dir: {folder} has an unfinished profile with another {name} ({there!r:.120}, here {here!r:.120}); "
            "give another folder, or --overwrite"
        )
    before = began.load(SECONDS, lambda record: float(record["seconds"])) or 0.0
    return replace(began, seconds_before=before)


@contextmanager
def held_profile(folder: Path) -> Iterator[None]:
    """Hold a profile's folder, which is made if it is not there, for this process alone until the block ends.

    Raises:
        ConfigError: another process measures into it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with held_folder(folder, "--output-dir", f"measures into {folder}"):
        yield


@contextmanager
def held_stages(
    folder: Path, identity: Mapping[str, Any], *, overwrite: bool = False, started: float | None = None
) -> Iterator[Stages]:
    """`open_stages`, of a folder that is held for this process alone until the block ends.

    Raises:
        ConfigError: as `open_stages`, or another process measures into the folder.
    """
    check_folder(folder, overwrite=overwrite)
    with held_profile(folder):
        yield open_stages(folder, identity, overwrite=overwrite, started=started)
