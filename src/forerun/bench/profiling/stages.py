"""The folder of a profile while it is measured: each finished stage is kept, so that an interrupted one goes on."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from forerun.core.writable import check_writable_folder
from forerun.errors import ConfigError
from forerun.plan.profile import PROFILE_FILE, write_json

T = TypeVar("T")

STAGES = "stages"
IDENTITY_FILE = "identity.json"


def digest(prompts: Sequence[Any]) -> str:
    """Some prompts, texts or token ids, in a few letters: other prompts have others."""
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Stages:
    """Results by stage, as JSON files in a folder; made by `open_stages`."""

    folder: Path

    def path(self, name: str, suffix: str = ".json") -> Path:
        """The file of a stage."""
        return self.folder / STAGES / f"{name}{suffix}"

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
            raise ConfigError(f"{path} is damaged ({error}); delete it, so that this stage is measured again") from None

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
            raise ConfigError(
                f"{self.path(name)} is damaged ({why}); delete it, so that this stage is measured again"
            ) from None

    def keep(self, name: str, record: Mapping[str, Any]) -> None:
        """Keep what a stage found."""
        write_json(self.path(name), record)

    def names(self) -> list[str]:
        """The stages that have ended; not what a killed process left half written, which has one more ending."""
        files = (self.folder / STAGES).glob("*.json")
        return sorted(path.stem for path in files if path.suffixes == [".json"] and path.name != IDENTITY_FILE)


def check_folder(folder: Path, *, overwrite: bool = False) -> None:
    """Refuse a folder that a profile could not be written to; before anything is loaded.

    Raises:
        ConfigError: it cannot be written, or has a finished profile or other files.
    """
    check_writable_folder("--output-dir", folder)
    if overwrite:
        return
    if (folder / PROFILE_FILE).is_file():
        raise ConfigError(f"--output-dir: {folder} has a profile already; give another folder, or --overwrite")
    if folder.is_dir() and not (folder / STAGES).is_dir() and any(folder.iterdir()):
        raise ConfigError(
            f"--output-dir: {folder} has other files; give a new folder, or --overwrite to write beside them"
        )


def is_begun(folder: Path) -> bool:
    """Whether a folder has a profile that goes on when it is measured again."""
    return (folder / STAGES).is_dir() and not (folder / PROFILE_FILE).is_file()


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


def open_stages(folder: Path, identity: Mapping[str, Any], *, overwrite: bool = False) -> Stages:
    """Begin a profile's folder, or go on with one of the same measurement.

    Args:
        folder: is made if it is not there.
        identity: what the stages depend on: model, machine, version, what is measured.
        overwrite: begin anew, whatever is there.

    Raises:
        ConfigError: the folder has a finished profile, stages of another measurement, or other files.
    """
    check_folder(folder, overwrite=overwrite)
    stages = folder / STAGES
    if overwrite:
        shutil.rmtree(stages, ignore_errors=True)
        (folder / PROFILE_FILE).unlink(missing_ok=True)
    found = begun_identity(folder)
    if found is None:
        stages.mkdir(parents=True, exist_ok=True)
        write_json(stages / IDENTITY_FILE, identity)
        return Stages(folder)
    wanted = json.loads(json.dumps(identity))
    for name in {**wanted, **found}:
        if found.get(name) != wanted.get(name):
            raise ConfigError(
                f"--output-dir: {folder} has an unfinished profile with another {name} ({found.get(name)!r:.120}, "
                f"here {wanted.get(name)!r:.120}); give another folder, or --overwrite"
            )
    return Stages(folder)
