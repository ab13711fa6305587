"""Sends requests to a server at given times, and sums up the answers."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import aiohttp
import numpy as np

from forerun.bench.load.answer import Answer, LoadRequest
from forerun.bench.load.client import Endpoint, ask
from forerun.bench.load.figures import find_peaks
from forerun.bench.load.measure import TIMEOUT
from forerun.bench.load.sender import Ask
from forerun.errors import ForerunError


class FailedRequestError(ForerunError):
    """A server refused a request, or broke off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """The figures of one run; latencies in seconds.

    `seconds` is from the first arrival to the last answer. `texts` are digests, in the order of arrival.
    """

    config: str
    pace: float  # arrivals come so many times as fast
    round: int
    seconds: float
    num_requests: int
    num_tokens: int
    most_running: int  # requests within one second
    mean_latency: float  # from arrival to the last token
    p95_latency: float
    mean_ttft: float
    mean_tpot: float  # time per output token after the first
    texts: list[str]

    @property
    def requests_per_second(self) -> float:
        """Answered requests / duration."""
        return self.num_requests / self.seconds

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON."""
        return asdict(self)


async def load_server(
    url: str, model: str, prompts: Sequence[str], times: Sequence[float], *, max_tokens: int, num_warmups: int
) -> tuple[list[Answer], float]:
    """Send each prompt at its time, greedily, whether or not earlier ones are answered.

    Args:
        url: of the server.
        model: its name in requests.
        prompts: user messages, one for each arrival; then those of the warm-up.
        times: of arrival, in seconds.
        max_tokens: of each answer.
        num_warmups: requests that are sent at once before the measurement.

    Returns:
        The answers in the order of arrival, and the seconds to the last one.

    Raises:
        FailedRequestError: a request failed.
    """
    endpoint = Endpoint(
        url=f"{url}/v1/chat/completions", backend="openai-chat", model=model, body={"temperature": 0}, headers={}
    )
    requests = [LoadRequest(prompt, max_tokens) for prompt in prompts]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=TIMEOUT) as session:
        send = partial(ask, session, endpoint)
        warmups = requests[len(times) : len(times) + num_warmups]
        _check(await asyncio.gather(*(send(one, f"warmup-{number}") for number, one in enumerate(warmups))))
        answers, seconds = await send_at(times, requests, send)
    _check(answers)
    return answers, seconds


async def send_at(times: Sequence[float], requests: Sequence[LoadRequest], send: Ask) -> tuple[list[Answer], float]:
    """Send one request at each time; the answers in their order, and the seconds to the last one."""
    start = time.perf_counter()
    tasks = []
    async with asyncio.TaskGroup() as group:
        for number, due in enumerate(times):
            await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
            tasks.append(group.create_task(_send_due(start + due, requests[number], str(number), send)))
    return [task.result() for task in tasks], time.perf_counter() - start


async def _send_due(due: float, request: LoadRequest, request_id: str, send: Ask) -> Answer:
    """Send a request now, and note how late that is."""
    answer = await send(request, request_id)
    answer.queue_time = answer.started - due
    return answer


def _check(answers: Sequence[Answer]) -> None:
    for answer in answers:
        if answer.error is not None:
            raise FailedRequestError(f"a request failed: {answer.error}; nothing was measured")


def sum_up(answers: Sequence[Answer], seconds: float, *, config: str, pace: float, round_number: int) -> LoadResult:
    """The figures of a run, of answers without errors."""
    latencies = [answer.latency + answer.queue_time for answer in answers]
    return LoadResult(
        config=config,
        pace=pace,
        round=round_number,
        seconds=seconds,
        num_requests=len(answers),
        num_tokens=sum(answer.num_output_tokens or 0 for answer in answers),
        most_running=find_peaks(answers).num_requests,
        mean_latency=float(np.mean(latencies)),
        p95_latency=float(np.percentile(latencies, 95)),
        mean_ttft=float(np.mean([answer.ttft + answer.queue_time for answer in answers])),
        mean_tpot=float(np.mean([answer.tpot for answer in answers if answer.tpot is not None] or [0.0])),
        texts=[hashlib.sha256(answer.text.encode()).hexdigest()[:8] for answer in answers],
    )
