"""How long the prompts of running requests are, where all workers can read it."""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from array import array
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from forerun.errors import ConfigError

KEPT_S = 24 * 3600.0
"""Seconds after which a file is of no use: no stream runs that long, and its worker has not ended it."""

KEPT_AFTER_END_S = 60.0
OLD_SOUGHT_EVERY_S = 300.0
"""Seconds after which files of no use are looked for again."""


class PromptLengths:
    """One small file per request: its number of prompt tokens and their digest, by the id that the frontend gave it.

    When a worker dies the frontend sends the prompt and all tokens written so far to another, as one list, and
    does not say where the prompt ends. Penalties that count written tokens depend on it, so requests with such are
    noted here; all others need no file. A client may choose the id, and so give one to several requests: the digest
    tells whose note it is.

    Args:
        folder: shared by the workers of a model; made if it is missing.

    Raises:
        ConfigError: the folder cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ended: deque[tuple[float, str]] = deque()  # when, as files have it, and which request
        self._tidying = threading.Lock()  # requests come in several threads
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--workers-folder: cannot make {folder} ({error.strerror}); give a folder that this worker may write"
            ) from None
        self._forget_old()

    def find_or_note(self, request_id: str, token_ids: Sequence[int]) -> int:
        """The length of a request's prompt as its first worker noted it; that of all tokens, noted now, if this is the first."""
        self._tidy()
        path = self._path(request_id)
        with suppress(FileNotFoundError):
            noted = path.read_text()
            num_tokens = int(noted.split()[0])
            if noted == _note(token_ids[:num_tokens]):
                path.touch()  # so that `_forget_ended` keeps it, where an earlier stream of this request has ended
                return num_tokens
        unfinished = path.with_suffix(f".{secrets.token_hex(8)}")  # others may note under the same id
        unfinished.write_text(_note(token_ids))
        unfinished.rename(path)
        return len(token_ids)

    def forget_soon(self, request_id: str) -> None:
        """Remove the note of a request that has ended, some time later: the frontend may not have got its last tokens."""
        self._ended.append((time.time(), request_id))

    def _path(self, request_id: str) -> Path:
        return self._folder / hashlib.sha256(request_id.encode()).hexdigest()  # an id may hold anything

    def _tidy(self) -> None:
        """Remove the notes of requests that have ended, and now and then those that nobody has ended."""
        if not self._tidying.acquire(blocking=False):  # another thread is at it
            return
        try:
            self._forget_ended()
            if time.monotonic() - self._sought > OLD_SOUGHT_EVERY_S:
                self._forget_old()
        finally:
            self._tidying.release()

    def _forget_ended(self) -> None:
        while self._ended and time.time() - self._ended[0][0] > KEPT_AFTER_END_S:
            ended, request_id = self._ended.popleft()
            path = self._path(request_id)
            with suppress(FileNotFoundError):
                if path.stat().st_mtime <= ended:  # else it came again
                    path.unlink()

    def _forget_old(self) -> None:
        self._sought = time.monotonic()
        for path in self._folder.iterdir():
            with suppress(OSError):  # another worker was faster
                if time.time() - path.stat().st_mtime > KEPT_S:
                    path.unlink()


def _note(token_ids: Sequence[int]) -> str:
    return f"{len(token_ids)} {hashlib.sha256(array('q', token_ids)).hexdigest()}"
