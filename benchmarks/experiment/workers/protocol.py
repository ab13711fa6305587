"""What a worker is asked and answers, line by line as `benchmarks.peers.workers.protocol` says.

    {"load": {"model": folder, "settings": {...}, "speculation": {...} or null}}
    {"batch": {"prompts": [[token ids], ...], "max_tokens": n}}

Settings and speculation are in the engine's own words. Imports nothing that an engine's environment may lack.
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
    """A request's new tokens; seconds since its batch was given; tokens drafted and accepted.

    The first token's time is that of the first one that the target has verified.
    """

    token_ids: list[int]
    first_token_seconds: float
    seconds: float
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Worker:
    """A loaded engine: `generate` answers prompts given together, greedily, until the end of text or so many tokens.

    `num_failed_drafts` counts drafts that failed and were left out, where the engine goes on without them.
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
    """The most that torch in this process has held on all GPUs; None without one."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    return sum(int(torch.cuda.max_memory_reserved(device)) for device in range(torch.cuda.device_count()))
