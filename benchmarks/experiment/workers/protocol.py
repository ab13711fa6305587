"""The requests and replies of a worker, one JSON object per line as in `benchmarks.peers.workers.protocol`.

    {"load": {"model": folder, "settings": {...}, "speculation": {...} or null}}
    {"batch": {"prompts": [[token ids], ...], "max_tokens": n}}

Settings and speculation are the engine's own keywords. This module imports nothing that an engine's environment
may lack.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.peers.workers.protocol import exchange

Prompts = list[list[int]]


@dataclass(frozen=True)
class Load:
    """The target and how to run it; `speculation` is None for plain decoding."""

    model: str
    settings: dict[str, Any]
    speculation: dict[str, Any] | None


@dataclass(frozen=True)
class Answer:
    """A request's new tokens, their times in seconds since the start of the batch, and its counts of draft tokens.

    The first token's time is that of the first token that the target has verified.
    """

    token_ids: list[int]
    first_token_seconds: float
    seconds: float
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Worker:
    """A loaded engine.

    `generate` answers a batch of prompts greedily, each up to its end of text or a number of tokens.
    `num_failed_drafts` counts failed drafts that the engine went on without.
    """

    version: str
    generate: Callable[[Prompts, int], list[Answer]]
    num_failed_drafts: Callable[[], int] = lambda: 0


def serve(start: Callable[[Load], Worker]) -> None:
    """Answer requests until standard input ends."""
    worker: Worker | None = None

    def answer(request: str, arguments: dict[str, Any]) -> dict[str, Any] | None:
        nonlocal worker
        began = time.perf_counter()
        if request == "load":
            worker = start(Load(**arguments))
            return {"seconds": time.perf_counter() - began, "version": worker.version}
        if worker is None:
            raise RuntimeError(f"request: got {request!r} before load")
        if request != "batch":
            return None
        answers = worker.generate(arguments["prompts"], arguments["max_tokens"])
        return {
            "seconds": time.perf_counter() - began,
            "answers": [asdict(one) for one in answers],
            "num_failed_drafts": worker.num_failed_drafts(),
            "cpu_seconds": time.process_time(),
            "peak_gpu_bytes": peak_gpu_bytes(),
        }

    exchange(answer)


def peak_gpu_bytes() -> int | None:
    """Peak bytes that torch in this process held on all GPUs, or None without a GPU."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    return sum(int(torch.cuda.max_memory_reserved(device)) for device in range(torch.cuda.device_count()))
