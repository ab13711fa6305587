"""Sends requests at the times that the traffic asks for, and collects the answers."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from forerun.bench.instruments import Clock
from forerun.bench.load.answer import Answer, LoadRequest
from forerun.bench.load.workload import Traffic

NUM_POINTS = 1000  # at which a rising rate is sampled for its mean gap

Floats = NDArray[np.float64]

Ask = Callable[[LoadRequest, str], Awaitable[Answer]]
"""Sends a request with an id and returns its answer; a failure of the server is recorded in the answer, not raised."""


def rates(traffic: Traffic, count: int) -> Floats:
    """The rate, in requests per second, at the arrival of each of `count` requests."""
    if traffic.ramp_up_start_rps is None or traffic.ramp_up_end_rps is None:
        return np.full(count, traffic.request_rate)
    start, end = traffic.ramp_up_start_rps, traffic.ramp_up_end_rps
    progress = np.arange(count) / max(count - 1, 1)
    if traffic.ramp_up_strategy == "linear":
        return np.asarray(start + (end - start) * progress)
    return np.asarray(start * (end / start) ** progress)


def draw_arrivals(traffic: Traffic, count: int, random: np.random.Generator) -> Floats:
    """Arrival times of `count` requests, in seconds from the start.

    At a constant rate they are scaled so that the last request arrives at count / rate: the sum of
    random gaps, and so every throughput, would be off by a percent or two.
    """
    if not traffic.has_rate:
        return np.zeros(count)
    gaps = 1 / rates(traffic, count)
    if traffic.burstiness != math.inf:
        gaps = random.gamma(traffic.burstiness, gaps / traffic.burstiness)
    times = np.cumsum(gaps)
    if traffic.ramp_up_strategy is None:
        times *= count / traffic.request_rate / times[-1]
    return np.asarray(times)


def draw_arrivals_within(traffic: Traffic, seconds: float, random: np.random.Generator) -> Floats:
    """Arrival times within `seconds`: as many as fill them at the mean gap, without those that fall later."""
    mean_gap = float((1 / rates(traffic, NUM_POINTS)).mean())
    times = draw_arrivals(traffic, max(round(seconds / mean_gap), 1), random)
    return np.asarray(times[times <= seconds * (1 + 1e-9)])


@dataclass(slots=True)
class Run:
    """The answers to a load, in the order of their requests."""

    answers: list[Answer] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)  # of the answers' requests, in order of arrival
    num_arrived: int = 0  # requests that arrived, sent or not
    seconds: float = 0.0  # from the start to the last answer

    @property
    def num_unsent(self) -> int:
        """Requests that arrived in time but were still waiting for a free place when the time was up."""
        return self.num_arrived - len(self.answers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """Sends requests; `on_answer` is called after each answer."""

    ask: Ask
    traffic: Traffic
    seed: int
    id_prefix: str = ""
    on_answer: Callable[[], object] = lambda: None
    clock: Clock = time.perf_counter

    async def warm_up(self, requests: Sequence[LoadRequest]) -> list[Answer]:
        """Send all requests at once, up to the maximum concurrency, and return the answers."""
        places = self._places()

        async def send(number: int, request: LoadRequest) -> Answer:
            async with places:
                return await self.ask(request, f"{self.id_prefix}warmup-{number}")

        return list(await asyncio.gather(*(send(number, request) for number, request in enumerate(requests))))

    async def send(self, requests: Sequence[LoadRequest]) -> Run:
        """Send each request once or, if the traffic has a duration, all of them in turn until the time is up."""
        with _frozen_garbage_collector():
            start = self.clock()
            run = await (
                self._send_closed_loop(requests) if self.traffic.is_closed_loop else self._send_at_times(requests)
            )
            run.seconds = self.clock() - start
        return run

    async def _send_at_times(self, requests: Sequence[LoadRequest]) -> Run:
        """Send each request at its arrival time, whether or not earlier ones are answered (open loop)."""
        traffic, random = self.traffic, np.random.default_rng(self.seed)
        if traffic.duration is None:
            times = draw_arrivals(traffic, len(requests), random)
        else:
            times = draw_arrivals_within(traffic, traffic.duration, random)
        places = self._places()
        start = self.clock()
        deadline = None if traffic.duration is None else start + traffic.duration

        async def send(number: int, arrived: float) -> Answer | None:
            must_wait = places.locked()
            async with places:
                if must_wait and deadline is not None and self.clock() > deadline:
                    return None
                answer = await self.ask(requests[number % len(requests)], f"{self.id_prefix}{number}")
            answer.queue_time = answer.started - arrived
            self.on_answer()
            return answer

        tasks = []
        async with asyncio.TaskGroup() as group:
            for number, seconds in enumerate(times.tolist()):
                wait = start + seconds - self.clock()
                if wait > 0:
                    await asyncio.sleep(wait)
                tasks.append(group.create_task(send(number, self.clock())))
        sent = {number: answer for number, task in enumerate(tasks) if (answer := task.result()) is not None}
        return Run(list(sent.values()), list(sent), num_arrived=len(tasks))

    async def _send_closed_loop(self, requests: Sequence[LoadRequest]) -> Run:
        """Keep the maximum concurrency of requests running until the time is up."""
        deadline = self.clock() + (self.traffic.duration or 0)
        numbers = itertools.count()
        answers: dict[int, Answer] = {}

        async def send_in_turn() -> None:
            while self.clock() < deadline:
                number = next(numbers)
                answers[number] = await self.ask(requests[number % len(requests)], f"{self.id_prefix}{number}")
                self.on_answer()

        async with asyncio.TaskGroup() as group:
            for _ in range(self.traffic.max_concurrency or 1):
                group.create_task(send_in_turn())
        return Run([answers[number] for number in sorted(answers)], sorted(answers), num_arrived=len(answers))

    def _places(self) -> asyncio.Semaphore:
        return asyncio.Semaphore(self.traffic.max_concurrency or sys.maxsize)


@contextmanager
def _frozen_garbage_collector() -> Iterator[None]:
    """Exclude existing objects from garbage collection, whose pauses would delay requests."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
