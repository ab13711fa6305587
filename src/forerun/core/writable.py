"""Whether files and folders can be written, asked before anything is computed for them."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryFile

from forerun.errors import ConfigError


def check_writable_file(option: str, path: Path | None) -> None:
    """Refuse a file that could not be written, if one is given; what is there stays as it is.

    Raises:
        ConfigError: it is a folder, may not be written, or nothing can be written where it would be.
    """
    if path is None:
        return
    try:
        if path.is_file() or path.is_dir():
            path.open("ab").close()
        elif not path.exists():  # pipes and devices are left alone
            TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ConfigError(
            f"{option}: cannot write {path} ({error.strerror}); give a file in a folder that exists and can be written"
        ) from None


def check_writable_folder(option: str, path: Path | None) -> None:
    """Refuse a folder that could not be made or written to, if one is given; it is not made yet.

    Raises:
        ConfigError: it is a file, or nothing can be written there, or where it would be made.
    """
    if path is None:
        return
    if (refusal := write_refusal(nearest_existing(path))) is not None:
        raise ConfigError(f"{option}: cannot write to {path} ({refusal}); give a folder that can be made and written")


def nearest_existing(path: Path) -> Path:
    """The path, or the nearest of its parents, that is there."""
    return next((one for one in (path, *path.parents) if os.path.exists(one)), path)


def write_refusal(folder: Path) -> str | None:
    """Why the system writes no file in a folder; None if it does."""
    try:
        TemporaryFile(dir=folder).close()
    except OSError as error:
        return error.strerror
    return None
