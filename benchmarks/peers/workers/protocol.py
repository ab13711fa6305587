"""The requests and replies of a worker: one JSON object per line on standard input and output.

    {"load": {"model": ..., "max_model_len": ..., "num_threads": ..., "speculation": {...} or null}}
    {"generate": {"prompts": [[token ids], ...], "max_tokens": n}}
    {"curve": {"rows": [1, 8], "context": 256, "repeats": 15}}
    {"bandwidth": {}}

Each is answered by {"ok": {...}}, {"unsupported": request} or {"error": message}; the peer's own prints go to
standard error. This module imports nothing that a peer's environment may lack.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Prompts = list[list[int]]


@dataclass(frozen=True)
class Load:
    """The model and its settings; `speculation` is None for plain decoding, or has the peer's own keywords, as `settings` has."""

    model: str
    max_model_len: int
    num_threads: int
    speculation: dict[str, Any] | None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Written:
    """The generated tokens of each prompt, and the counts of drafted and accepted tokens if the peer reports them."""

    token_ids: list[list[int]]
    drafted: int | None = None
    accepted: int | None = None


@dataclass(frozen=True)
class Worker:
    """The functions of a loaded peer; None where it has no public interface for one.

    generate: generates a fixed number of tokens after each prompt of a batch, greedily and past any end of text.
    curve: seconds of each of `repeats` forward passes over `rows` of one sequence after `context` tokens, with
        logits of all rows, by number of rows.
    bandwidth: bytes per second that all threads read from memory now.
    """

    version: str
    generate: Callable[[Prompts, int], Written]
    curve: Callable[[list[int], int, int], dict[int, list[float]]] | None = None
    bandwidth: Callable[[], float] | None = None


def serve(start: Callable[[Load], Worker]) -> None:
    """Answer requests until standard input ends."""
    worker: Worker | None = None

    def answer(request: str, arguments: dict[str, Any]) -> dict[str, Any] | None:
        nonlocal worker
        if request != "load":
            return _answer(worker, request, arguments)
        worker, loaded = _load(start, Load(**arguments))
        return loaded

    exchange(answer)


def exchange(answer: Callable[[str, dict[str, Any]], dict[str, Any] | None]) -> None:
    """Reply to each line of standard input with the result of `answer`, called with its request and arguments."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    reply: dict[str, Any]
    for line in sys.stdin:
        ((request, arguments),) = json.loads(line).items()
        try:
            answered = answer(request, arguments)
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        else:
            reply = {"ok": {**answered, "peak_bytes": peak_bytes()}} if answered else {"unsupported": request}
        replies.write(json.dumps(reply) + "\n")


def _load(start: Callable[[Load], Worker], load: Load) -> tuple[Worker, dict[str, Any]]:
    began = time.perf_counter()
    worker = start(load)
    return worker, {"seconds": time.perf_counter() - began, "version": worker.version}


def _answer(worker: Worker | None, request: str, arguments: dict[str, Any]) -> dict[str, Any] | None:
    """The result of a request, or None if the worker does not support it."""
    if worker is None:
        raise RuntimeError(f"request: got {request!r} before load")
    if request == "generate":
        return _generate(worker, **arguments)
    if request == "curve" and worker.curve:
        return {"seconds": worker.curve(arguments["rows"], arguments["context"], arguments["repeats"])}
    if request == "bandwidth" and worker.bandwidth:
        return {"bytes_per_second": worker.bandwidth()}
    return None


def _generate(worker: Worker, prompts: Prompts, max_tokens: int) -> dict[str, Any]:
    """Generate the first tokens alone and then all, and time both: the difference is decoding alone."""
    began = time.perf_counter()
    worker.generate(prompts, 1)
    first = time.perf_counter()
    written = worker.generate(prompts, max_tokens)
    ended = time.perf_counter()
    for token_ids in written.token_ids:
        if len(token_ids) != max_tokens:
            raise RuntimeError(f"max_tokens: asked for {max_tokens} tokens, got {len(token_ids)}")
    return {"first_token_seconds": first - began, "seconds": ended - first, **asdict(written)}


def peak_bytes() -> int:
    """The sum of the peak resident bytes of this process and its descendants."""
    return _peak(Path("/proc/self")) + sum(_peak(child) for child in _descendants(os.getpid()))


def _descendants(parent: int) -> list[Path]:
    children = [
        int(pid) for file in Path(f"/proc/{parent}/task").glob("*/children") for pid in file.read_text().split()
    ]
    return [Path(f"/proc/{child}") for child in children] + [
        found for child in children for found in _descendants(child)
    ]


def _peak(process: Path) -> int:
    for line in (process / "status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0  # a process that has ended


def seconds_of(work: Callable[[], object]) -> float:
    """The duration of `work`."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
