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
from dataclasses import replace
from pathlib import Path
from typing import IO, Protocol

import torch

from forerun.core.batch import LayerKVSpec
from forerun.errors import ForerunError, WorkerError
from forerun.models.packed_cache import PackedModel
from forerun.ops.native.sharded.exchange import Exchange

LAST_CALL_S = 1.0  # that a call in progress has to notice that rank 0 is gone


class Works(Protocol):
    """What has loaded a rank's part."""

    def run(self) -> None:
        """Do what rank 0 asks until the group ends.

        Raises:
            WorkerError: the group has ended.
        """
        ...


def identity_of(path: Path, *, weight_format: str, level: str, dtype: torch.dtype) -> str:
    """All that a rank's weights depend on, files and code among it: equal on all ranks."""
    key = PackedModel(path=path, format=weight_format, level=level, dtype=str(dtype)).key()
    return json.dumps(key, sort_keys=True)


def check_identity(expected: str, path: Path, *, weight_format: str, level: str, dtype: torch.dtype, rank: int) -> None:
    """Raise `WorkerError` where a rank finds other files or code than rank 0 has loaded."""
    if identity_of(path, weight_format=weight_format, level=level, dtype=dtype) != expected:
        raise WorkerError(
            f"tensor parallel: rank {rank} finds other weights or another version of forerun than rank 0 in {path} "
            "and in its own package; start again when nothing changes them"
        )


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
            worker.run()
    except WorkerError:
        return 0  # another rank's end is that rank's to report
    return 0


def _end_with_rank_0(exchange: Exchange | None) -> None:
    """Wait until rank 0 closes this process's standard input, which its end does, too; then end."""
    with contextlib.suppress(OSError):
        sys.stdin.buffer.read()
    if exchange is not None:
        exchange.end(0)
        time.sleep(LAST_CALL_S)
    os._exit(0)


def _reply(replies: IO[str], **content: object) -> None:
    replies.write(json.dumps(content) + "\n")
    replies.flush()
