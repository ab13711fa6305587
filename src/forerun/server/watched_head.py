"""A folder whose trained head drafts for the served model from when it is there on, and again whenever it changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from forerun.errors import ForerunError
from forerun.server.engine_thread import EngineEndedError
from forerun.server.served_model import ServedModel

logger = logging.getLogger(__name__)

PERIOD_S = 5.0  # seconds from one look to the next
FILES = ("config.json", "model.safetensors")

Stamp = tuple[tuple[int, int], ...]
"""Time of change (ns) and size of each file."""


class WatchedHead:
    """Looks every few seconds, and takes in a head whose files have not changed since the last look.

    `forerun train` packages the best head that it measured, the one it began with among them. A head that cannot be used is
    reported once, and the one before goes on drafting; one that another failure kept out is tried again at the next look.
    Texts are the same with any head.

    Args:
        model: what is served.
        folder: where `forerun train` writes, or will.
        report: shows a line to whoever started the server.
    """

    def __init__(self, model: ServedModel, folder: Path, *, report: Callable[[str], None]) -> None:
        self._model, self._folder, self._report = model, folder, report

    async def run(self) -> None:
        """Watch until the engine has ended."""
        taken: Stamp | None = None
        before: Stamp | None = None
        while True:
            stamp = self._stamp()
            if stamp is not None and stamp == before and stamp != taken:
                try:
                    if await self._take():
                        taken = stamp
                except EngineEndedError:
                    return
            before = stamp
            await asyncio.sleep(PERIOD_S)

    def _stamp(self) -> Stamp | None:
        """The files as they are now; None if one is missing."""
        try:
            found = [(self._folder / name).stat() for name in FILES]
        except OSError:
            return None
        return tuple((file.st_mtime_ns, file.st_size) for file in found)

    async def _take(self) -> bool:
        """Whether these files are done with: the head is used, or it cannot be."""
        try:
            await self._model.engine.ask(lambda _engine: self._model.llm.replace_head(self._folder))
        except ForerunError as error:
            self._report(f"--watch-head: the head in {self._folder} is not used: {error}")
            return True
        except EngineEndedError:
            raise
        except Exception:  # whatever it is, the server goes on with the head that it has
            logger.exception("--watch-head: the head in %s is not used yet", self._folder)
            return False
        self._report(f"--watch-head: the head in {self._folder} drafts from now on")
        return True
