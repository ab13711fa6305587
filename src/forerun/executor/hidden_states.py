"""Saves the hidden states of sequences that end: one safetensors file each, in vLLM's layout."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from forerun.core.sampling_params import KVTransferParams, SamplingParams
from forerun.core.sequence import Sequence
from forerun.core.step import EndedSequence
from forerun.errors import ConfigError, RequestError
from forerun.kv.cache import KVCache

logger = logging.getLogger(__name__)

DEFAULTS = KVTransferParams()


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """vLLM's `kv_connector_extra_config`, with its defaults.

    `use_synchronization_lock`: hold an exclusive flock on `<path>.lock` until the file at `path` is complete.
    `allow_custom_save_path`: requests may name their file, anywhere that this process may write.

    Raises:
        ConfigError: a value is of a wrong type or out of range.
    """

    shared_storage_path: str | PathLike[str] = "/tmp"
    num_writer_threads: int = 8
    use_synchronization_lock: bool = True
    allow_custom_save_path: bool = False

    def __post_init__(self) -> None:
        path, num_threads = self.shared_storage_path, self.num_writer_threads
        if not isinstance(path, (str, PathLike)) or not str(path):
            raise ConfigError(f"shared_storage_path: got {path!r:.80}; must be a folder")
        if Path(path).exists() and not Path(path).is_dir():
            raise ConfigError(f"shared_storage_path: got {str(path)!r}, which is a file; must be a folder")
        if not isinstance(num_threads, int) or isinstance(num_threads, bool) or num_threads < 1:
            raise ConfigError(f"num_writer_threads: got {num_threads!r}; must be an integer of 1 or more")
        for name in ("use_synchronization_lock", "allow_custom_save_path"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}: got {getattr(self, name)!r:.80}; must be True or False")


class HiddenStatesExporter:
    """Copies a sequence's `features` out of the cache and writes them in threads, while the engine goes on.

    A file holds "hidden_states" [num_tokens, num_features, hidden_size] in the cache's dtype and
    "token_ids" [num_tokens] int64. It appears under its name when it is complete. No more files wait in
    memory than there are threads: `save` waits for one of them. What is not written yet when the exporter
    is dropped or the process ends is still written.

    Raises:
        ConfigError: the folder cannot be made.
    """

    def __init__(self, features: tuple[str, ...], storage: Storage) -> None:
        self._features = features
        self._storage = storage
        self._writes: dict[str, Future[None]] = {}  # path -> its write, until it succeeds or is asked for
        self._room = threading.Semaphore(storage.num_writer_threads)
        self._writers = ThreadPoolExecutor(storage.num_writer_threads, thread_name_prefix="hidden-states")
        try:
            os.makedirs(storage.shared_storage_path, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"shared_storage_path: cannot make the folder ({error}); choose another") from error

    def check(self, request_id: str, sampling: SamplingParams) -> None:
        """Refuse a request whose file would not lie where it may.

        Raises:
            RequestError: it names a file, which is not allowed or stands for several completions; or its id
                cannot be part of a file's name.
        """
        path = (sampling.kv_transfer or DEFAULTS).hidden_states_path
        if path is not None and not self._storage.allow_custom_save_path:
            raise RequestError(
                f"hidden_states_path: got {path!r:.80}, but requests may not choose where to write; leave it out, or set "
                "allow_custom_save_path in kv_connector_extra_config"
            )
        if path is not None and sampling.n > 1:
            raise RequestError(
                f"hidden_states_path: got {path!r:.80} for n={sampling.n} completions with a file each; leave it out"
            )
        if "/" in request_id or "\0" in request_id:
            raise RequestError(
                f"request_id: got {request_id!r:.80}; is part of a file's name; choose one without slashes"
            )

    def path(self, request_id: str, index: int, sampling: SamplingParams) -> str:
        """The file of completion `index`: the request's choice, or vLLM's name with a random end.

        The name is the request's id, after the completion's place where there are several.
        """
        chosen = (sampling.kv_transfer or DEFAULTS).hidden_states_path
        if chosen is not None:
            return chosen
        name = f"{index}_{request_id}" if sampling.n > 1 else request_id
        return os.path.join(self._storage.shared_storage_path, f"{name}-{secrets.token_hex(4)}.safetensors")

    def save(self, sequence: Sequence, ended: EndedSequence, cache: KVCache) -> None:
        """Begin to write the file of a sequence that has ended, while it still holds its blocks."""
        path = ended.hidden_states_path
        assert path is not None, "called only where it is wanted"
        tensors = self._tensors(sequence, ended, cache)
        self.finish(path)
        self._room.acquire()
        self._writes[path] = write = self._begin(path, tensors)
        write.add_done_callback(partial(self._note, path))

    def finish(self, path: str) -> BaseException | None:
        """Wait until the file at `path` is complete; return what prevented that, if anything did."""
        write = self._writes.pop(path, None)
        return None if write is None else write.exception()

    def _tensors(self, sequence: Sequence, ended: EndedSequence, cache: KVCache) -> dict[str, Tensor]:
        include_output_tokens = (sequence.sampling.kv_transfer or DEFAULTS).include_output_tokens
        num_tokens = len(sequence) - 1 if include_output_tokens else len(sequence.prompt_ids)
        size = cache.block_size
        assert ended.blocks is not None, "they are given with the path"
        places = torch.from_numpy(ended.blocks.astype("int64")).unsqueeze(1) * size + torch.arange(size)
        slots = places.flatten()[:num_tokens].to(cache.layers[0].key.device)
        rows = [cache.features[name].index_select(0, slots) for name in self._features]
        return {
            "hidden_states": torch.stack(rows, dim=1).cpu(),
            "token_ids": torch.tensor(sequence.tokens_between(0, num_tokens), dtype=torch.int64),
        }

    def _begin(self, path: str, tensors: Mapping[str, Tensor]) -> Future[None]:
        """Take the lock now, so that who learns the path finds it taken; write in a thread."""
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            lock = _take_lock(path) if self._storage.use_synchronization_lock else None
        except (OSError, ValueError) as error:
            failed: Future[None] = Future()
            failed.set_exception(error)
            return failed
        return self._writers.submit(_write, dict(tensors), path, lock)

    def _note(self, path: str, write: Future[None]) -> None:
        """A write is over: make room for the next."""
        error = write.exception()
        if error is not None:
            logger.error("hidden states: cannot write %s (%s)", path, error)
        elif self._writes.get(path) is write:
            self._writes.pop(path, None)  # a thread may ask for it at this moment
        self._room.release()


def _take_lock(path: str) -> int:
    """An open file beside `path` with an exclusive flock on it."""
    lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        os.close(lock)
        raise
    return lock


def _write(tensors: dict[str, Tensor], path: str, lock: int | None) -> None:
    """Write a file, whole or not at all, and release its lock."""
    unfinished = f"{path}.part"
    try:
        save_file(tensors, unfinished)
        os.replace(unfinished, path)
    finally:
        if os.path.exists(unfinished):
            os.unlink(unfinished)
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_UN)  # a forked child may hold the file open too
            os.close(lock)
