"""What the other processes of a tensor-parallel group have in common, whatever computes their parts.

`group.py` starts one with the descriptor of the shared memory. It reads what it shall load from its standard input, on
one line, and says on its standard output when it is ready. It ends when rank 0 does, which its standard input tells.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Protocol, Self

import torch

from forerun.core.batch import LayerKVSpec
from forerun.errors import ForerunError, WorkerError
from forerun.models.packed_cache import PackedModel
from forerun.ops.native.sharded.exchange import Exchange, ExchangeSizes

LAST_CALL_S = 1.0  # that a call in progress has to notice that rank 0 is gone


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What a worker must know, as JSON, whatever computes its part.

    `level` is that of the kernels by which messages come, `identity` what rank 0 has loaded: a worker that finds other
    files or code refuses to start.
    """

    rank: int
    path: str
    load_format: str
    max_model_len: int | None
    dtype: str
    level: str
    sizes: ExchangeSizes
    num_threads: int
    identity: str

    def to_json(self) -> str:
        """On one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Self:
        """The twin of `to_json`."""
        content: dict[str, Any] = json.loads(line)
        return cls(**{**content, "sizes": ExchangeSizes(**content["sizes"])})

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found

    def check_identity(self, weight_format: str) -> None:
        """Raise `WorkerError` where this process finds other files or code than rank 0 has loaded."""
        path = Path(self.path)
        own = identity_of(path, weight_format=weight_format, level=self.level, dtype=self.torch_dtype)
        if own != self.identity:
            raise WorkerError(
                f"tensor parallel: rank {self.rank} finds other weights or another version of forerun than rank 0 in {path} "
                "and in its own package; start again when nothing changes them"
            )


class Works(Protocol):
    """What has loaded a rank's part."""

    def begin(self) -> None:
        """Do what has to wait until rank 0 knows that the part is loaded."""
        ...

    def obey(self, message: Any) -> None:
        """Do what rank 0 asks."""
        ...


def identity_of(path: Path, *, weight_format: str, level: str, dtype: torch.dtype) -> str:
    """All that a rank's weights depend on, files and code among it: equal on all ranks."""
    key = PackedModel(path=path, format=weight_format, level=level, dtype=str(dtype)).key()
    return json.dumps(key, sort_keys=True)


def local_specs(specs: Sequence[LayerKVSpec], num_kv_heads: int) -> list[LayerKVSpec]:
    """The KV specs of a rank's heads."""
    return [replace(spec, num_kv_heads=num_kv_heads) for spec in specs]


def run_worker(descriptor: int, load: Callable[[str, int], tuple[Exchange, Works]]) -> int:
    """Load, say so, and work until rank 0 ends; the exit status is 0 unless this process failed."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is not for rank 0
    line = sys.stdin.buffer.readline().decode()
    if not line:
        return 0
    try:
        with torch.inference_mode():
            exchange, worker = load(line, descriptor)
    except (ForerunError, OSError) as error:
        _reply(replies, error=str(error))
        return 1
    threading.Thread(target=_end_with_rank_0, args=(exchange,), daemon=True).start()
    _reply(replies, error=None)
    try:
        with torch.inference_mode():
            worker.begin()
            while True:
                message = exchange.receive()
                if message is not None:
                    worker.obey(message)
                    exchange.finish()
    except WorkerError:  # another rank's end is that rank's to report
        os._exit(0)  # at once: Python would take torch's objects apart first


def _end_with_rank_0(exchange: Exchange | None) -> None:
    """Wait until rank 0 closes this process's standard input, which its end does, too; then end."""
    with contextlib.suppress(OSError):
        while os.read(0, 1 << 16):  # not of the buffer, whose lock would be held when this process ends otherwise
            pass
    if exchange is not None:
        exchange.end(0)
        time.sleep(LAST_CALL_S)
    os._exit(0)


def _reply(replies: IO[str], **content: object) -> None:
    replies.write(json.dumps(content) + "\n")
    replies.flush()
