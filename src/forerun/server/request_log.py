"""The request log: a line for each completion that has ended, by which a simulation serves the same load again.

The lines are those of mooncake's traces. They have no text and no token: of prompts they have names of their KV blocks,
which say no more than where two prompts begin alike.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import forerun
from forerun.core.outputs import RequestOutput
from forerun.errors import ConfigError
from forerun.kv.prefix_cache import block_digests, root_digest
from forerun.plan.simulation.traces import LOG_KEY, LOG_VERSION

logger = logging.getLogger(__name__)

NAME_BITS = 53  # of a block's name: what a double holds, for readers whose numbers are doubles


class _Ended(NamedTuple):
    output: RequestOutput
    cache_salt: str | None


class RequestLog:
    """Appends lines to a file, on a thread of its own: who hands requests over waits for nothing.

    The first line of a server's life says of how many tokens a block is. Blocks have the same name where their tokens, all
    tokens before them and the requests' `cache_salt` are the same. Names are keyed with a secret of the process: nobody can
    guess a prompt and look whether it is in the log, and names of two lives have nothing in common.

    Args:
        path: the file; what is in it stays, but for a last line that is unfinished.
        model: the served name.
        block_size: tokens of a KV block.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path, *, model: str, block_size: int) -> None:
        try:
            _end_last_line(path)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"request_log: cannot write {path} ({error.strerror or error}); give a file in a folder that exists"
            ) from None
        self._path = path
        self._block_size = block_size
        self._key = secrets.token_bytes(32)
        self._begun = time.time() - time.monotonic()  # of the monotonic clock, since 1970
        self._salts: dict[str, str] = {}  # of requests that are in the engine
        self._ended: SimpleQueue[_Ended | None] = SimpleQueue()
        self._write({LOG_KEY: LOG_VERSION, "forerun": forerun.__version__, "model": model, "block_size": block_size})
        self._file.flush()
        self._thread = threading.Thread(target=self._run, name="forerun-request-log", daemon=True)
        self._thread.start()

    def note(self, request_id: str, cache_salt: str | None) -> None:
        """Remember the salt of a request that comes in; any thread."""
        if cache_salt is not None:
            self._salts[request_id] = cache_salt

    def forget(self, request_id: str) -> None:
        """Forget a request that came in and will not run; any thread."""
        self._salts.pop(request_id, None)

    def add(self, finished: Sequence[RequestOutput]) -> None:
        """Hand over requests that have ended; the engine's thread."""
        for output in finished:
            self._ended.put(_Ended(output, self._salts.pop(output.request_id, None)))

    def close(self) -> None:
        """Write what is left."""
        self._ended.put(None)
        self._thread.join()

    def _run(self) -> None:
        ended = None
        try:
            while (ended := self._ended.get()) is not None:
                for line in self._lines(ended):
                    self._write(line)
                if self._ended.empty():
                    self._file.flush()
            self._file.close()
        except Exception:
            logger.exception("%s: the request log ends here; the server goes on", self._path)
            with suppress(OSError):
                self._file.close()
            with suppress(OSError):
                _end_last_line(self._path)
            while ended is not None:  # what nobody will write must not pile up
                ended = self._ended.get()

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")

    def _lines(self, ended: _Ended) -> list[dict[str, Any]]:
        """A line for each completion, all with the prompt's blocks."""
        output, metrics = ended.output, ended.output.metrics
        assert metrics is not None, "the engine notes when a request arrives"
        digests = block_digests(root_digest(ended.cache_salt), output.prompt_token_ids, block_size=self._block_size)
        names = [self._name(digest) for digest in digests]
        return [
            {
                "timestamp": round(1e3 * (self._begun + metrics.arrival_time), 3),
                "input_length": len(output.prompt_token_ids),
                "output_length": len(completion.token_ids),
                "hash_ids": names,
                "finish_reason": completion.finish_reason,
            }
            for completion in output.outputs
        ]

    def _name(self, digest: bytes) -> int:
        keyed = hashlib.blake2b(digest, key=self._key, digest_size=8).digest()
        return int.from_bytes(keyed, "big") >> (64 - NAME_BITS)


def _end_last_line(path: Path) -> None:
    """Cut off a last line that is unfinished, as a full disk or a kill leaves it; a whole one is ended."""
    if not path.is_file() or not path.stat().st_size:
        return
    with path.open("a+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            begin = content.rfind(b"\n") + 1
            last = content[begin:]
        if not last:
            return
        try:
            json.loads(last)
            file.write(b"\n")
        except (ValueError, RecursionError):
            logger.warning("%s: its last line is unfinished, and is cut off", path)
            file.truncate(begin)
