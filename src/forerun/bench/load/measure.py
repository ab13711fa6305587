"""A load test from the first warm-up to the last look at the server's counters."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import aiohttp

from forerun.bench.energy import Energy, EnergyMeter
from forerun.bench.load.answer import LoadRequest
from forerun.bench.load.arrivals import rates
from forerun.bench.load.client import ask
from forerun.bench.load.endpoint import Endpoint
from forerun.bench.load.run import Run, Sender
from forerun.bench.load.scrape import DraftCounts
from forerun.bench.load.server import ServedModel, Server
from forerun.bench.load.traffic import Traffic

logger = logging.getLogger(__name__)

TIMEOUT = aiohttp.ClientTimeout(total=6 * 60 * 60)  # seconds, as vLLM's client waits


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is sent where and when."""

    base_url: str
    model_id: str  # where the model lies, if the server says; its name in requests is the endpoint's
    endpoint: Endpoint
    requests: Sequence[LoadRequest]
    warmups: Sequence[LoadRequest]
    traffic: Traffic
    seed: int
    id_prefix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What came of it."""

    run: Run
    started: datetime
    drafts: DraftCounts | None  # None: the server has no such counters, or drafted nothing
    energy: Energy
    client_cpu_seconds: float
    server_version: str | None


Bar = Callable[[], AbstractContextManager[Callable[[], object]]]
"""Opens a progress bar, and closes it; what it gives is called after each answer."""


async def find_model(base_url: str, headers: dict[str, str], *, model: str | None, wait: float) -> ServedModel:
    """The model that a server has, or the one named, once the server is ready.

    Raises:
        ConfigError: no server answers within `wait` seconds, or it lists no model.
    """
    async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
        server = Server(session, base_url, headers)
        await server.wait(wait)
        return await server.first_model() if model is None else ServedModel(model, model)


async def measure(load: Load, meter: EnergyMeter, bar: Bar) -> Measurement:
    """Warm the server up, load it, and look at its counters of drafts before and after."""
    connector = aiohttp.TCPConnector(limit=load.traffic.max_concurrency or 0, keepalive_timeout=60)
    async with aiohttp.ClientSession(connector=connector, timeout=TIMEOUT) as session:
        server = Server(session, load.base_url, load.endpoint.headers)
        make_sender = partial(
            Sender,
            ask=partial(ask, session, load.endpoint),
            traffic=load.traffic,
            seed=load.seed,
            id_prefix=load.id_prefix,
        )
        for answer in await make_sender().warm_up(load.warmups):
            if answer.error is not None:
                logger.warning("a warm-up request failed: %s", answer.error)
        before, version = await server.draft_counts(), await server.version()
        started, cpu_seconds = datetime.now(), time.process_time()
        with meter, bar() as on_answer:
            run = await make_sender(on_answer=on_answer).send(load.requests)
        cpu_seconds = time.process_time() - cpu_seconds
        after = await server.draft_counts()
    return Measurement(
        run=run,
        started=started,
        drafts=None if before is None or after is None else after.since(before),
        energy=meter.energy,
        client_cpu_seconds=cpu_seconds,
        server_version=version,
    )


def count_tokens(run: Run, encode: Callable[[], Callable[[str], list[int]]]) -> None:
    """Count the tokens of answers that came without usage; `encode` is asked for the tokenizer only if there are any.

    Raises:
        ModelError: there are some, and no tokenizer.
    """
    silent = [answer for answer in run.answers if answer.error is None and answer.num_output_tokens is None]
    if silent:
        logger.warning("%d answers came without usage: their text is counted by the tokenizer", len(silent))
        to_ids = encode()
        for answer in silent:
            answer.num_output_tokens = len(to_ids(answer.text))
            prompt, known = answer.request.prompt, answer.request.num_prompt_tokens
            answer.num_prompt_tokens = len(to_ids(prompt)) if known is None and isinstance(prompt, str) else known
    for answer in run.answers:
        if answer.num_prompt_tokens is None:
            answer.num_prompt_tokens = answer.request.num_prompt_tokens


def rate_events(traffic: Traffic, run: Run, started: datetime) -> list[dict[str, Any]]:
    """When a rising rate reached each whole number of requests per second, as vLLM writes it."""
    if traffic.ramp_up_start_rps is None or not run.answers:
        return []
    first = run.answers[0].started
    reached = int(traffic.ramp_up_start_rps)
    events = [{"rps": reached, "timestamp": started.isoformat()}]
    all_rates = rates(traffic, run.num_arrived).tolist()
    for number, answer in zip(run.numbers, run.answers, strict=True):
        rate = int(all_rates[number])
        moment = started + timedelta(seconds=answer.started - answer.queue_time - first)
        events += [{"rps": rps, "timestamp": moment.isoformat()} for rps in range(reached + 1, rate + 1)]
        reached = max(reached, rate)
    return events
