"""A loaded model that answers Dynamo's requests: what a worker does, without Dynamo."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from prometheus_client import CollectorRegistry

from forerun.core.outputs import RequestOutput, StreamDelta
from forerun.deploy.dynamo.kv_events import KVEvents
from forerun.deploy.dynamo.prompt_lengths import PromptLengths
from forerun.deploy.dynamo.requests import WorkerRequest, translate, wants_nothing
from forerun.deploy.dynamo.streams import Chunk, TokenStream, nothing_left
from forerun.engine.client import EngineRequest, EngineSnapshot
from forerun.engine.stats import Metric
from forerun.errors import RequestError
from forerun.llm import LLM
from forerun.server.engine_thread import EngineEndedError, EngineThread
from forerun.server.metrics import LiveCollector, ServerMetrics

NUM_INTAKE_THREADS = 4
NUM_GRAMMAR_THREADS = 2  # apart: a new grammar may take seconds, which others need not wait for
MOST_METRICS_WAIT_S = 3.0  # for a step to end
LOAD_INTERVAL_S = 0.05  # between two reports of the load while requests run

ReportLoad = Callable[[int, int, float | None], None]
"""Takes the KV blocks in use, all there are, and the share of prompt tokens found in the prefix cache (None: not known)."""


class TokenService:
    """Token ids in, token ids out, over one engine in a thread of its own.

    `events` are what the prefix cache tells the router, `registry` the metrics. Made and used on the event loop.

    Args:
        llm: the model.
        name: what requests call it, in metrics.
        prompt_lengths: where the prompts of requests are noted whose text depends on them; None: such are refused.
    """

    def __init__(self, llm: LLM, *, name: str, prompt_lengths: PromptLengths | None) -> None:
        self._llm = llm
        self._prompt_lengths = prompt_lengths
        self._pool = llm.engine.parts.pool
        self.events = KVEvents(self._pool)
        self._metrics = ServerMetrics(name)
        self.registry = CollectorRegistry()
        self.registry.register(LiveCollector(self._engine_metrics, self._metrics))
        self._report_load: ReportLoad | None = None
        self._load: tuple[int, int, float | None] | None = None  # as it was reported last
        self._reported = 0.0  # when that was
        self._engine = EngineThread(llm.engine, observe=self._observe)
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count()
        # by the frontend's id, then by the engine's
        self._streams: dict[str, dict[str, tuple[WorkerRequest, TokenStream]]] = {}
        self._threads = ThreadPoolExecutor(NUM_INTAKE_THREADS, thread_name_prefix="forerun-intake")
        self._grammar_threads = ThreadPoolExecutor(NUM_GRAMMAR_THREADS, thread_name_prefix="forerun-grammars")

    def start(self) -> None:
        """Begin to serve."""
        self._engine.start()

    def report_load_to(self, report: ReportLoad) -> None:
        """Report the load there, from the engine's thread, whenever it changes."""
        self._report_load = report

    async def generate(self, request: Mapping[str, Any], request_id: str) -> AsyncGenerator[Chunk, None]:
        """The chunks of a request; a generator that is closed aborts it.

        Raises:
            RequestError: the request is not served here, or does not fit the model.
            EngineError: the engine failed; `EngineEndedError` if it has ended.
        """
        if wants_nothing(request):
            yield nothing_left(len(request["token_ids"]))
            return
        defaults = self._llm.sampling_defaults.values
        asked = translate(request, request_id=request_id, seed=self._llm.settings.seed, defaults=defaults)
        stream = TokenStream(num_prompt_tokens=len(asked.prompt_ids), num_top_logprobs=asked.sampling.logprobs)
        engine_id = f"{request_id}/{next(self._ids)}"
        self._streams.setdefault(request_id, {})[engine_id] = asked, stream
        try:
            accepted = await self._accept(asked, stream, request_id, engine_id)
            if accepted is None or stream.is_cancelled:
                self._engine.engine.withdraw(engine_id)
            else:
                self._engine.submit([accepted], stream)
            async for chunk in stream.chunks():
                if chunk.get("finish_reason") is not None:
                    self._forget(asked, request_id)
                yield chunk
        except RequestError:  # which the client hears: no other worker gets it
            self._forget(asked, request_id)
            raise
        finally:
            self._leave(request_id, engine_id)

    def abort(self, request_id: str) -> None:
        """End a request and its text; one that has ended, or never came, is left alone."""
        for engine_id, (asked, stream) in [*self._streams.get(request_id, {}).items()]:
            stream.cancel()
            self._forget(asked, request_id)
            self._leave(request_id, engine_id)  # whoever read the chunks may not come back

    def close(self) -> None:
        """End the engine's thread; requests in flight end with an error."""
        self._engine.stop()
        for threads in (self._threads, self._grammar_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _accept(
        self, asked: WorkerRequest, stream: TokenStream, request_id: str, engine_id: str
    ) -> EngineRequest | None:
        """Check a request and make ready what it needs, in a thread; None where it ended before one had begun with it."""
        threads = self._threads if asked.sampling.constraint is None else self._grammar_threads
        accepting = self._loop.run_in_executor(threads, self._accept_now, asked, stream, request_id, engine_id)
        try:
            return await asyncio.shield(accepting)
        except asyncio.CancelledError:  # a thread that has begun goes on, and nobody will submit what it accepts
            stream.cancel()
            accepting.add_done_callback(lambda _: self._engine.engine.withdraw(engine_id))
            raise

    def _accept_now(
        self, asked: WorkerRequest, stream: TokenStream, request_id: str, engine_id: str
    ) -> EngineRequest | None:
        if stream.is_cancelled:
            return None
        output_ids: Sequence[int] = ()
        if asked.counts_written_tokens:
            asked, output_ids = self._resumed(asked, request_id)
        request = EngineRequest(
            request_id=engine_id,
            prompt_ids=asked.prompt_ids,
            sampling=asked.sampling,
            cache_salt=asked.cache_salt,
            output_ids=output_ids,
        )
        self._engine.engine.accept(request)
        return request

    def _resumed(self, asked: WorkerRequest, request_id: str) -> tuple[WorkerRequest, list[int]]:
        """The request as the client sent it, and what another worker has written of its text."""
        if self._prompt_lengths is None:
            raise RequestError(
                "presence_penalty, frequency_penalty: a text that moves to another worker would lose count of what it "
                "has written; give the workers a folder that they share (--workers-folder), or use repetition_penalty"
            )
        return asked.resumed(self._prompt_lengths.find_or_note(request_id, asked.prompt_ids))

    def _forget(self, asked: WorkerRequest, request_id: str) -> None:
        """The text has ended; where the engine failed, or a stream was only closed, it has not, and may go on elsewhere."""
        if asked.counts_written_tokens and self._prompt_lengths is not None:
            self._prompt_lengths.forget_soon(request_id)

    def _leave(self, request_id: str, engine_id: str) -> None:
        """Let go of a request, whatever has become of it; doing so again changes nothing."""
        streams = self._streams.get(request_id, {})
        if streams.pop(engine_id, None) is None:
            return
        if not streams:
            del self._streams[request_id]
        with suppress(EngineEndedError):  # it holds nothing then
            self._engine.abort([engine_id])

    def _observe(self, deltas: Sequence[StreamDelta], finished: Sequence[RequestOutput], now: float) -> None:
        """After each step, on the engine's thread."""
        self._metrics.observe(deltas, finished, now)
        self.events.publish()
        if self._report_load is not None:
            self._report(self._report_load, now)

    def _report(self, report: ReportLoad, now: float) -> None:
        engine, pool = self._llm.engine, self._pool
        if now - self._reported < LOAD_INTERVAL_S and engine.has_work:
            return
        state = engine.state
        share = state.num_cached_tokens / state.num_queried_tokens if state.num_queried_tokens else None
        load = pool.num_blocks - pool.num_free, pool.num_blocks, share
        if load != self._load:
            self._load, self._reported = load, now
            report(*load)

    def _engine_metrics(self) -> list[Metric]:
        """The engine's counters; asked for by whichever thread is scraping."""
        answer = asyncio.run_coroutine_threadsafe(self._engine.ask(lambda engine: engine.snapshot()), self._loop)
        try:
            snapshot: EngineSnapshot = answer.result(MOST_METRICS_WAIT_S)
        except (EngineEndedError, TimeoutError):
            return []
        return snapshot.metrics()
