"""Sends requests to an engine in this process as a load says: by the wall clock, or in virtual time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forerun.core.sampling_params import SamplingParams
from forerun.engine.client import EngineRequest
from forerun.engine.engine import Engine
from forerun.errors import RequestError
from forerun.plan.tuning.run_figures import RequestTimes

ALMOST_NOW = 1e-9  # seconds: sums of seconds are not exact


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedRequest:
    """A prompt, how it is to be answered and, where requests come at a rate, when it arrives (seconds from the start)."""

    prompt_ids: Sequence[int]
    sampling: SamplingParams
    arrival: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """The times and answers (token ids) of all requests, in their order, and the seconds from start to last token."""

    times: list[RequestTimes]
    answers: list[list[int]]
    seconds: float


@dataclass(slots=True)
class _Answer:
    """What a request has been given so far; seconds from the start of the drive."""

    arrived: float
    token_ids: list[int] = field(default_factory=list)
    first: float = 0.0
    last: float = 0.0
    num_chunks: int = 0

    def times(self) -> RequestTimes:
        return RequestTimes(
            ttft=self.first - self.arrived,
            e2el=self.last - self.arrived,
            num_tokens=len(self.token_ids),
            num_chunks=self.num_chunks,
        )


def drive(
    engine: Engine,
    requests: Sequence[OfferedRequest],
    *,
    concurrency: int | None,
    salt: str,
    clock: Callable[[], float],
    wait: Callable[[float], object],
    on_end: Callable[[int], object] = lambda _: None,
    on_step: Callable[[float], object] = lambda _: None,
) -> Drive:
    """Have all requests answered.

    A request's latencies count from its arrival, also where it arrives during a step and so waits for its end.

    Args:
        engine: idle; it is stepped here.
        requests: in the order of their arrival.
        concurrency: the clients, each of which sends the next request when its last one is answered; None: every
            request comes at its own time.
        salt: requests of other salts share neither prefix-cached KV nor what a drafter remembers.
        clock: the engine's, in seconds.
        wait: lets seconds pass while there is nothing to do.
        on_end: called with the number of each request that has ended.
        on_step: called with the seconds that each step of the engine took.

    Raises:
        RequestError: a request does not fit, or failed.
    """
    start = clock()
    waiting = deque(range(len(requests)))
    running: dict[str, int] = {}
    answers: dict[int, _Answer] = {}

    def is_due(now: float) -> bool:
        if concurrency is not None:
            return len(running) < concurrency
        return requests[waiting[0]].arrival <= now + ALMOST_NOW

    while waiting or running:
        now = clock() - start
        while waiting and is_due(now):
            number = waiting.popleft()
            request = requests[number]
            request_id = f"{salt}, {number}"
            engine.accept(
                EngineRequest(
                    request_id=request_id, prompt_ids=request.prompt_ids, sampling=request.sampling, cache_salt=salt
                )
            )
            engine.submit(request_id)
            running[request_id] = number
            answers[number] = _Answer(now if concurrency is not None else request.arrival)
        if not running:
            wait(requests[waiting[0]].arrival - now)
            continue
        step_start = clock()
        output = engine.step()
        now = clock()
        on_step(now - step_start)
        now -= start
        for delta in output.deltas:
            if delta.finish_reason == "error":
                raise RequestError(f"a request failed: {delta.stop_reason}; nothing was measured")
            answer = answers[running[delta.request_id]]
            if delta.token_ids:
                answer.first = answer.first if answer.token_ids else now
                answer.last = now
                answer.num_chunks += 1
                answer.token_ids += delta.token_ids
            if delta.finish_reason is not None:
                on_end(running.pop(delta.request_id))
    ended = [answers[number] for number in range(len(requests))]
    return Drive(
        times=[one.times() for one in ended], answers=[one.token_ids for one in ended], seconds=clock() - start
    )
