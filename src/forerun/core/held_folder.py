"""Folders in which one process works at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from forerun.errors import ConfigError

LOCK_FILE = "lock"


@contextmanager
def held_folder(folder: Path, option: str, work: str) -> Iterator[None]:
    """Hold a folder for this process alone: two that worked there at once would spoil each other's files.

    Args:
        folder: must be there; it gets a file of its own for this, which stays.
        option: that the folder was named by, for errors.
        work: what another process that holds it does there, for errors.

    Raises:
        ConfigError: another process holds it, or nothing can be written there.
    """
    try:
        lock = FileLock(folder / LOCK_FILE).acquire(timeout=0)
    except Timeout:
        raise ConfigError(f"{option}: another process {work}; wait for it, or give another folder") from None
    except OSError as error:
        raise ConfigError(f"{option}: cannot write in {folder} ({error}); give a place that can be written") from error
    with lock:
        yield
