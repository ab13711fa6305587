"""Runs a load test: waits for the server, warms it up, loads it, and reads its counters before and after."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from functools import partial

import aiohttp

from forerun.bench.energy import Energy, EnergyMeter
from forerun.bench.load.answer import Answer, LoadRequest
from forerun.bench.load.client import Endpoint, ask
from forerun.bench.load.sender import Run, Sender
from forerun.bench.load.server import DraftCounts, ServedModel, Server
from forerun.bench.load.workload import Traffic
from forerun.errors import ForerunError

logger = logging.getLogger(__name__)

TIMEOUT = aiohttp.ClientTimeout(total=6 * 60 * 60)  # seconds, as in vLLM's client


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests to send, the server, and the traffic."""

    base_url: str
    model_id: str  # the model's folder or hub id as the server reports it; the endpoint has its name in requests
    endpoint: Endpoint
    requests: Sequence[LoadRequest]
    warmups: Sequence[LoadRequest]
    traffic: Traffic
    seed: int
    id_prefix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The answers of a run, and what else was measured during it."""

    run: Run
    started: datetime
    drafts: DraftCounts | None  # None if the server has no such counters, or drafted nothing
    energy: Energy
    client_cpu_seconds: float
    server_version: str | None


Bar = Callable[[], AbstractContextManager[Callable[[], object]]]
"""Opens and closes a progress bar; the function that it yields is called after each answer."""


async def find_model(base_url: str, headers: dict[str, str], *, model: str | None, wait: float) -> ServedModel:
    """Wait until the server is ready and return `model`, or the server's first one if that is None.

    Raises:
        ConfigError: no server is ready within `wait` seconds, or it lists no model.
    """
    async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
        server = Server(session, base_url, headers)
        await server.wait(wait)
        return await server.first_model() if model is None else ServedModel(model, model)


async def measure(load: Load, meter: EnergyMeter, bar: Bar) -> Measurement:
    """Warm the server up and load it, and read its counters of drafts before and after.

    Ctrl-C from then on ends the run early: see `Sender.send`.
    """
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
        after = await _counts_after(run, server)
    return Measurement(
        run=run,
        started=started,
        drafts=None if before is None or after is None else after.since(before),
        energy=meter.energy,
        client_cpu_seconds=cpu_seconds,
        server_version=version,
    )


async def _counts_after(run: Run, server: Server) -> DraftCounts | None:
    """The server's counts of drafts after a run; Ctrl-C, if it is the first, ends the wait for them and not the run."""
    try:
        return await server.draft_counts()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or run.is_interrupted:
            raise
        task.uncancel()
        run.is_interrupted = True
        return None


def count_tokens(run: Run, encode: Callable[[], Callable[[str], list[int]]]) -> None:
    """Count the tokens of answers without usage; `encode` loads the tokenizer and is called only if there are any.

    Where it cannot be loaded their counts stay unknown, and what was measured is kept.
    """
    uncounted = [answer for answer in run.answers if answer.error is None and answer.num_output_tokens is None]
    if uncounted:
        logger.warning("%d answers came without usage: their text is counted by the tokenizer", len(uncounted))
        try:
            _count_by(encode(), uncounted)
        except ForerunError as error:
            logger.warning("their tokens are not known, nor is what is computed by them: %s", error)
    for answer in run.answers:
        if answer.num_prompt_tokens is None:
            answer.num_prompt_tokens = answer.request.num_prompt_tokens


def _count_by(to_ids: Callable[[str], list[int]], answers: Sequence[Answer]) -> None:
    for answer in answers:
        answer.num_output_tokens = len(to_ids(answer.text))
        prompt, known = answer.request.prompt, answer.request.num_prompt_tokens
        answer.num_prompt_tokens = len(to_ids(prompt)) if known is None and isinstance(prompt, str) else known
