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
LEAST_SECONDS = 1e-300  # that can be scaled: of very uneven gaps hardly any is above 0

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
    if traffic.ramp_up_strategy is None and times[-1] > LEAST_SECONDS:
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
    num_requests: int = 0  # to send, sent or not
    num_unfinished: int = 0  # sent, and broken off when the run was interrupted
    is_interrupted: bool = False
    seconds: float = 0.0  # from the start to the last answer, or to the interruption

    @property
    def num_unsent(self) -> int:
        """Requests that were not sent: they waited for a free place when the time was up, or the run was interrupted."""
        return self.num_requests - self.num_unfinished - len(self.answers)


@dataclass(slots=True)
class _Sent:
    """A load while it is sent: what was sent of it, and the answers by their requests' numbers."""

    num_requests: int | None = None  # to send; None: as many as there is time for
    num_sent: int = 0
    answers: dict[int, Answer] = field(default_factory=dict)

    def run(self, seconds: float, *, is_interrupted: bool) -> Run:
        """The run that it was, once nothing is under way any more."""
        numbers = sorted(self.answers)
        return Run(
            answers=[self.answers[number] for number in numbers],
            numbers=numbers,
            num_requests=self.num_sent if self.num_requests is None else self.num_requests,
            num_unfinished=self.num_sent - len(self.answers),
            is_interrupted=is_interrupted,
            seconds=seconds,
        )


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
        """Send each request once or, if the traffic has a duration, all of them in turn until the time is up.

        The first Ctrl-C breaks off what is under way; what was answered by then is returned.

        Raises:
            CancelledError: it came before any answer.
        """
        sent, is_interrupted = _Sent(), False
        with _frozen_garbage_collector():
            start = self.clock()
            try:
                if self.traffic.is_closed_loop:
                    await self._send_closed_loop(requests, sent)
                else:
                    await self._send_at_times(requests, sent)
            except asyncio.CancelledError:  # which `asyncio.run` makes of Ctrl-C
                task = asyncio.current_task()
                if task is None or not sent.answers:
                    raise
                task.uncancel()
                is_interrupted = True
            seconds = self.clock() - start
        return sent.run(seconds, is_interrupted=is_interrupted)

    async def _send_at_times(self, requests: Sequence[LoadRequest], sent: _Sent) -> None:
        """Send each request at its arrival time, whether or not earlier ones are answered (open loop)."""
        traffic, random = self.traffic, np.random.default_rng(self.seed)
        if traffic.duration is None:
            times = draw_arrivals(traffic, len(requests), random)
        else:
            times = draw_arrivals_within(traffic, traffic.duration, random)
        sent.num_requests = len(times)
        places = self._places()
        start = self.clock()
        deadline = None if traffic.duration is None else start + traffic.duration

        async def send(number: int, arrived: float) -> None:
            must_wait = places.locked()
            async with places:
                if must_wait and deadline is not None and self.clock() > deadline:
                    return
                await self._send_one(requests, number, sent, arrived=arrived)

        async with asyncio.TaskGroup() as group:
            for number, seconds in enumerate(times.tolist()):
                wait = start + seconds - self.clock()
                if wait > 0:
                    await asyncio.sleep(wait)
                group.create_task(send(number, self.clock()))

    async def _send_closed_loop(self, requests: Sequence[LoadRequest], sent: _Sent) -> None:
        """Keep the maximum concurrency of requests running until the time is up."""
        deadline = self.clock() + (self.traffic.duration or 0)
        numbers = itertools.count()

        async def send_in_turn() -> None:
            while self.clock() < deadline:
                await self._send_one(requests, next(numbers), sent)

        async with asyncio.TaskGroup() as group:
            for _ in range(self.traffic.max_concurrency or 1):
                group.create_task(send_in_turn())

    async def _send_one(
        self, requests: Sequence[LoadRequest], number: int, sent: _Sent, *, arrived: float | None = None
    ) -> None:
        """Send a request and note its answer; `arrived` is when it began to wait for a place."""
        sent.num_sent += 1
        answer = await self.ask(requests[number % len(requests)], f"{self.id_prefix}{number}")
        answer.queue_time = 0.0 if arrived is None else answer.started - arrived
        sent.answers[number] = answer
        self.on_answer()

    def _places(self) -> asyncio.Semaphore:
        return asyncio.Semaphore(self.traffic.max_concurrency or sys.maxsize)


@contextmanager
def _frozen_garbage_collector() -> Iterator[None]:
    """Exclude existing objects from garbage collection, whose pauses would delay requests; what was frozen before stays so."""
    was_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()
