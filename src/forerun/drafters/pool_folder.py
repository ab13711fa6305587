"""Keeps a drafter's pools in a folder, so that a restarted process drafts from what the last one learnt."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from forerun.drafters.base import Pool
from forerun.drafters.pool_files import (
    ModelIdentity,
    PoolFileError,
    SavedPools,
    Sections,
    check_model,
    file_of,
    put_aside,
    read_pools,
    write_pools,
)
from forerun.errors import ConfigError

logger = logging.getLogger(__name__)

SAVE_EVERY_S = 300.0


class PoolFolder:
    """Loads the pools of one model from a folder, and saves them there while it runs and at its end.

    Nothing here harms a text: a file that cannot be used is named in one warning, put aside when a new one is
    written, and the pools begin empty. The folder is for one process at a time: of two that save the same model's
    pools there, the later wins.

    Args:
        folder: where the model's file lies, or will lie.
        pools: the drafter's pools by kind.
        model: whose they are.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        folder: Path,
        pools: Mapping[str, Pool],
        model: ModelIdentity,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = file_of(folder, model)
        self._pools = pools
        self._model = model
        self._clock = clock
        self._saved_at = clock()
        self._has_run = False
        self._has_warned = False
        self._is_unusable = False  # the file that is there
        self._writing = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"pools_folder: cannot make {folder} ({error}); give a folder that can be written"
            ) from error
        if not os.access(folder, os.W_OK):
            raise ConfigError(f"pools_folder: cannot write to {folder}; give a folder that can be written")

    def load(self) -> None:
        """Fill the pools from the file, if there is one; call it once, before the first sequence."""
        if not self.path.exists():
            return
        try:
            saved = read_pools(self.path)
            check_model(self.path, saved.model, self._model)
        except PoolFileError as error:
            self._is_unusable = True
            logger.warning("%s; it is ignored, and drafting begins with empty pools", error)
            return
        for kind, pool in self._pools.items():
            try:
                if kind in saved.kinds:
                    pool.from_arrays(saved.kinds[kind])
            except Exception as error:
                self._is_unusable = True
                logger.warning("%s: its %s pool cannot be used (%s); it begins empty", self.path, kind, error)

    def save_when_due(self) -> None:
        """Save if the last time was long enough ago; call it after each step. The file is written in another thread."""
        self._has_run = True
        if self._clock() - self._saved_at < SAVE_EVERY_S or self._writing.locked():
            return
        self._saved_at = self._clock()
        with self._reporting_failure():
            kinds = self._copy()
            threading.Thread(target=self._write, args=(kinds,), name="forerun-pools", daemon=True).start()

    def save(self) -> None:
        """Save now and wait for it; without a step since the start there is nothing to save."""
        if self._has_run:
            self._saved_at = self._clock()
            with self._reporting_failure():
                self._write(self._copy())

    def _copy(self) -> dict[str, Sections]:
        return {kind: pool.to_arrays() for kind, pool in self._pools.items()}

    def _write(self, kinds: Mapping[str, Sections]) -> None:
        """Write the file; pools of other kinds that are in it stay."""
        with self._writing, self._reporting_failure():
            others = self._other_kinds()
            if self._is_unusable:
                with suppress(FileNotFoundError):  # it may have been deleted, as the warning advises
                    put_aside(self.path)
                self._is_unusable = False
            write_pools(self.path, SavedPools(model=self._model, kinds={**others, **kinds}))

    @contextmanager
    def _reporting_failure(self) -> Iterator[None]:
        """Let a failure cost the file only; the first is logged."""
        try:
            yield
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("%s: the pools could not be saved (%s); drafting goes on", self.path, error)

    def _other_kinds(self) -> Mapping[str, Sections]:
        """The pools of this model in the file that another drafter left there."""
        with suppress(PoolFileError):
            if self.path.exists():
                saved = read_pools(self.path)
                check_model(self.path, saved.model, self._model)
                return saved.kinds
        return {}
