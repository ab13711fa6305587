"""Saves the hidden states of sequences that end: one safetensors file each, in vLLM's layout."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from safetensors.torch import save_file
from torch import Tensor

from forerun.core.sampling_params import KVTransferParams, SamplingParams
from forerun.engine.generation import Generation
from forerun.engine.kv_transfer_config import Storage
from forerun.errors import ConfigError, RequestError
from forerun.kv.cache import KVCache

logger = logging.getLogger(__name__)

DEFAULTS = KVTransferParams()


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

    def save(self, generation: Generation, cache: KVCache) -> str:
        """Begin to write the file of a sequence that has ended, while it still holds its slot; return its path."""
        wanted = generation.sequence.sampling.kv_transfer or DEFAULTS
        path = wanted.hidden_states_path or self._new_path(generation)
        tensors = self._tensors(generation, cache, include_output_tokens=wanted.include_output_tokens)
        self.finish(path)
        self._room.acquire()
        self._writes[path] = write = self._begin(path, tensors)
        write.add_done_callback(partial(self._note, path))
        return path

    def finish(self, path: str) -> BaseException | None:
        """Wait until the file at `path` is complete; return what prevented that, if anything did."""
        write = self._writes.pop(path, None)
        return None if write is None else write.exception()

    def _new_path(self, generation: Generation) -> str:
        """vLLM's names: the request's id, after the completion's place where there are several, and a random end."""
        several = generation.sequence.sampling.n > 1
        name = f"{generation.index}_{generation.request_id}" if several else generation.request_id
        return os.path.join(self._storage.shared_storage_path, f"{name}-{secrets.token_hex(4)}.safetensors")

    def _tensors(self, generation: Generation, cache: KVCache, *, include_output_tokens: bool) -> dict[str, Tensor]:
        sequence = generation.sequence
        num_tokens = len(sequence) - 1 if include_output_tokens else len(sequence.prompt_ids)
        device = cache.layers[0].key.device
        slots = torch.tensor(generation.slot.slots(0, num_tokens), device=device)
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
