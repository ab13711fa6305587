"""Counts the time that a stage takes, over all times that it was interrupted."""

from __future__ import annotations

import time
from types import TracebackType

from forerun.train.run_folder import RunFolder

SECONDS_PER_SAVE = 30.0


class StageClock:
    """Notes the time in the run's folder every half minute and at the end of the block."""

    def __init__(self, folder: RunFolder, stage: str) -> None:
        self._folder, self._stage = folder, stage
        self._noted = time.monotonic()

    def tick(self) -> float:
        """Return the seconds that the stage has taken so far."""
        unnoted = time.monotonic() - self._noted
        if unnoted > SECONDS_PER_SAVE:
            self.note()
            unnoted = 0.0
        return self._folder.progress.seconds.get(self._stage, 0.0) + unnoted

    def note(self) -> None:
        """Note the time that has passed since it last was."""
        now = time.monotonic()
        self._folder.spend(self._stage, now - self._noted)
        self._noted = now

    def __enter__(self) -> StageClock:
        self._noted = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.note()
