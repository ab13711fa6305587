"""Save the hidden states of sequences that end: one safetensors file each, in vLLM's layout."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path

import torch
from filelock import FileLock
from torch import Tensor

from forerun.core.integers import is_integer
from forerun.core.sampling_params import KVTransferParams, SamplingParams
from forerun.core.sequence import Sequence
from forerun.core.step import EndedSequence
from forerun.errors import ConfigError, RequestError
from forerun.kv.cache import KVCache
from forerun.models.checkpoint import save_tensors

logger = logging.getLogger(__name__)

DEFAULTS = KVTransferParams()
MOST_WAITING_BYTES = 2 << 30  # of files in memory that are not written yet
MOST_FAILURES = 1000  # whose reasons are kept until they are asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenStatesStorage:
    """vLLM's `kv_connector_extra_config`, with its defaults.

    `use_synchronization_lock`: hold an exclusive lock (flock) on `<path>.lock` while the file at `path` is written.
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
        if not is_integer(num_threads) or num_threads < 1:
            raise ConfigError(f"num_writer_threads: got {num_threads!r}; must be an integer of 1 or more")
        for name in ("use_synchronization_lock", "allow_custom_save_path"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}: got {getattr(self, name)!r:.80}; must be True or False")


class HiddenStatesExporter:
    """Copies a sequence's hidden states out of the cache and writes them in threads, while the engine goes on.

    A file holds "hidden_states" [num_tokens, num_features, hidden_size] in the cache's dtype and
    "token_ids" [num_tokens] int64. It appears under its name when it is complete. The engine never waits
    for the disk: `save` only adds to a queue of at most `MOST_WAITING_BYTES`, and where that is full the
    one request fails. A caller that may wait calls `wait_for_writers` between steps instead. Files in the
    queue are still written when the exporter is dropped or the process ends.

    Raises:
        ConfigError: the folder cannot be made.
    """

    def __init__(self, features: tuple[str, ...], storage: HiddenStatesStorage) -> None:
        self._features = features
        self._storage = storage
        self._changed = threading.Condition()  # guards what follows; notified when a write is over
        self._writes: dict[str, Future[None]] = {}  # path -> its last write, as long as it is not over
        self._failures: dict[str, str] = {}  # path -> why its last write failed, the latest last
        self._num_waiting = 0  # files in memory: in the queue or being written
        self._waiting_bytes = 0
        self._writers = ThreadPoolExecutor(storage.num_writer_threads, thread_name_prefix="hidden-states")
        try:
            os.makedirs(storage.shared_storage_path, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"shared_storage_path: cannot make the folder ({error}); choose another") from error

    def check(self, request_id: str, sampling: SamplingParams) -> None:
        """Refuse a request whose file must not or cannot be written.

        Raises:
            RequestError: it names a file, which is not allowed, or one file for several completions; or its id
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
        if not {"/", os.sep, "\0"}.isdisjoint(request_id):
            raise RequestError(
                f"request_id: got {request_id!r:.80}; is part of a file's name; choose one without slashes"
            )

    def path(self, request_id: str, index: int, sampling: SamplingParams) -> str:
        """Name the file of completion `index`: the request's choice, or as vLLM does.

        That is the completion's index if there are several, the request's id, and random digits.
        """
        chosen = (sampling.kv_transfer or DEFAULTS).hidden_states_path
        if chosen is not None:
            return chosen
        name = f"{index}_{request_id}" if sampling.n > 1 else request_id
        return os.path.join(self._storage.shared_storage_path, f"{name}-{secrets.token_hex(4)}.safetensors")

    def save(self, sequence: Sequence, ended: EndedSequence, cache: KVCache) -> None:
        """Queue the file of a sequence that has ended, while it still holds its KV blocks.

        Where the queue is full nothing is written, and `finish` returns the reason.
        """
        path = ended.hidden_states_path
        assert path is not None, "called only where it is wanted"
        include_output_tokens = (sequence.sampling.kv_transfer or DEFAULTS).include_output_tokens
        num_tokens = len(sequence) - 1 if include_output_tokens else len(sequence.prompt_ids)
        num_bytes = num_tokens * sum(cache.features[name][0].nbytes for name in self._features)
        with self._changed:
            if self._num_waiting and self._waiting_bytes + num_bytes > MOST_WAITING_BYTES:
                self._note_failure(path, f"{self._num_waiting} files wait for a disk that is slower than the engine")
                return
        try:
            tensors = self._tensors(sequence, ended, cache, num_tokens)
        except Exception as error:
            with self._changed:
                self._note_failure(path, f"{type(error).__name__}: {error}")
            return
        with self._changed:
            self._failures.pop(path, None)
            earlier = self._writes.get(path)
            self._writes[path] = write = self._writers.submit(self._write, tensors, path, earlier)
            self._num_waiting += 1
            self._waiting_bytes += num_bytes
        write.add_done_callback(partial(self._note, path, num_bytes))

    def finish(self, path: str) -> str | None:
        """Wait until the last write of the file at `path` is over; return what prevented it, or None."""
        with self._changed:
            self._changed.wait_for(lambda: path not in self._writes)
            return self._failures.get(path)

    def wait_for_writers(self) -> None:
        """Wait until no more files are in memory than there are threads that write."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_waiting <= self._storage.num_writer_threads)

    def _tensors(self, sequence: Sequence, ended: EndedSequence, cache: KVCache, num_tokens: int) -> dict[str, Tensor]:
        assert ended.blocks is not None, "they are given with the path"
        slots = cache.slots_of(ended.blocks)[:num_tokens].to(cache.layers[0].key.device)
        rows = [cache.features[name].index_select(0, slots) for name in self._features]
        return {
            "hidden_states": torch.stack(rows, dim=1).cpu(),
            "token_ids": torch.tensor(sequence.tokens_between(0, num_tokens), dtype=torch.int64),
        }

    def _write(self, tensors: Mapping[str, Tensor], path: str, earlier: Future[None] | None) -> None:
        """Write a file after an earlier one of the same path, whose thread began before this one."""
        if earlier is not None:
            earlier.exception()
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with FileLock(f"{path}.lock") if self._storage.use_synchronization_lock else nullcontext():
            _write_whole(tensors, path)

    def _note(self, path: str, num_bytes: int, write: Future[None]) -> None:
        """Note that a write is over: make room for others, and keep the reason if it failed."""
        error = write.exception()
        if error is not None:
            logger.error("hidden states: cannot write %s (%s)", path, error)
        with self._changed:
            self._num_waiting -= 1
            self._waiting_bytes -= num_bytes
            if self._writes.get(path) is write:
                del self._writes[path]
                if error is not None:
                    self._note_failure(path, str(error) or type(error).__name__)
            self._changed.notify_all()

    def _note_failure(self, path: str, reason: str) -> None:
        """Keep why a file was not written, and forget the oldest reasons: not every path is asked for."""
        self._failures.pop(path, None)
        self._failures[path] = reason
        if len(self._failures) > MOST_FAILURES:
            del self._failures[next(iter(self._failures))]


def _write_whole(tensors: Mapping[str, Tensor], path: str) -> None:
    """Write a file, whole or not at all."""
    unfinished = f"{path}.part"
    try:
        save_tensors(dict(tensors), unfinished)
        os.replace(unfinished, path)
    finally:
        if os.path.exists(unfinished):
            os.unlink(unfinished)
