"""The loaded model as the endpoints see it: its names and tokenizer, and how requests get into the engine and out."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, partial
from typing import TypeVar

from fastapi import Request

from forerun.core.outputs import RequestOutput, StreamDelta, TokenLogprobs
from forerun.core.sampling_params import SamplingParams
from forerun.engine.client import EngineRequest
from forerun.engine.stats import Metric
from forerun.errors import DeviceLostError, ModelError
from forerun.llm import LLM
from forerun.models.chat.formats import FORMATS, format_of, reasoning_form
from forerun.models.chat.reasoning import ReasoningForm
from forerun.models.chat.tool_format import ToolFormat
from forerun.server.engine_thread import EngineEndedError, EngineError, EngineThread, Event
from forerun.server.errors import RETRY_AFTER_S, ApiError, failed_while_running
from forerun.server.metrics import ServerMetrics
from forerun.server.options import ServerOptions
from forerun.server.request_log import RequestLog
from forerun.server.templates import Templates

T = TypeVar("T")

MOST_METRICS_WAIT_S = 3.0  # for a step to end; scrapers give up after 5 s or 10 s, and should get the rest
NUM_INTAKE_THREADS = 4
NUM_TOKENIZATION_THREADS = 2  # for /tokenize and /detokenize, whose texts may be longer than any prompt
NUM_GRAMMAR_THREADS = 2  # apart: a new grammar may take seconds, which others need not wait for

Tokenise = Callable[[], Sequence[tuple[str | None, Sequence[int]]]]
"""Returns (text, token ids) of each prompt; the text is None for a prompt that came as token ids."""

Refine = Callable[[SamplingParams], SamplingParams]
"""Returns how prompts are sampled, once they are tokenised, given how they would be."""


class ServedModel:
    """A model in service.

    Whatever may take long before the first step (chat templates, tokenising, sampling rules) runs in
    a few threads of its own: neither the event loop nor the engine waits for it.

    Args:
        llm: the model.
        options: see `ServerOptions`.
        when_lost: see `EngineThread`.
    """

    def __init__(
        self, llm: LLM, options: ServerOptions, *, when_lost: Callable[[DeviceLostError], None] | None = None
    ) -> None:
        self.llm = llm
        self.options = options
        self.name = options.served_model_name or llm.settings.model
        self.root = str(llm.path or llm.settings.model)
        self.created = int(time.time())
        self.sampling_defaults = llm.sampling_defaults.values
        self.metrics = ServerMetrics(self.name)
        self.request_log = None
        if options.request_log is not None:
            block_size = llm.engine.parts.block_size
            self.request_log = RequestLog(options.request_log, model=self.name, block_size=block_size)
        self.engine = EngineThread(
            llm.client, observe=self._observe, step_timeout=options.step_timeout, when_lost=when_lost
        )
        self.admission = Admission(most=llm.settings.max_num_seqs + options.max_queue)
        self.template_variables = llm.get_tokenizer().template_variables if llm.has_tokenizer else frozenset()
        self.templates = Templates()
        if llm.has_tokenizer and llm.get_tokenizer().has_chat_template:
            self.templates.prepare()
        self._ids = itertools.count()
        self._threads = ThreadPoolExecutor(NUM_INTAKE_THREADS, thread_name_prefix="forerun-intake")
        self._tokenization_threads = ThreadPoolExecutor(
            NUM_TOKENIZATION_THREADS, thread_name_prefix="forerun-tokenization"
        )
        self._grammar_threads = ThreadPoolExecutor(NUM_GRAMMAR_THREADS, thread_name_prefix="forerun-grammars")

    @property
    def speculates(self) -> bool:
        """Whether anything is drafted here."""
        return self.llm.speculative.num_speculative_tokens > 0

    @property
    def saves_hidden_states(self) -> bool:
        """Whether hidden states of requests are saved to files here."""
        return self.llm.speculative.storage is not None

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """How this model writes tool calls; None where that is not known."""
        name = self.options.tool_call_parser or format_of(self.tool_template)
        return None if name is None else FORMATS[name]

    @cached_property
    def tool_template(self) -> str | None:
        """The chat template that reads tools, if there is one."""
        return self.llm.get_tokenizer().tool_template if self.llm.has_tokenizer else None

    @cached_property
    def reasoning_form(self) -> ReasoningForm | None:
        """How this model writes its reasoning; None where that is not known, or it is not to be taken apart."""
        if not self.llm.has_tokenizer:
            return None
        return reasoning_form(self.llm.get_tokenizer(), self.options.reasoning_parser)

    @cached_property
    def hides_calls(self) -> bool:
        """Whether tool calls begin with a special token, which answers show only on demand."""
        return self.tool_format is not None and self.llm.get_tokenizer().is_special(self.tool_format.mark)

    @cached_property
    def hides_reasoning(self) -> bool:
        """Whether what stands around reasoning are special tokens."""
        form = self.reasoning_form
        return form is not None and any(map(self.llm.get_tokenizer().is_special, form.marks))

    @cached_property
    def spellings(self) -> Mapping[int, bytes]:
        """The bytes that each token spells; empty where the tokenizer's notation is not known."""
        try:
            return self.llm.get_tokenizer().vocabulary(self.llm.vocab_size).spellings
        except ModelError:
            return {}

    def read_spellings(self) -> None:
        """Read what tokens spell, so that `spell` need not: it takes a second where the vocabulary is large."""
        _ = self.spellings

    def spell(self, token_id: int, text: str) -> bytes:
        """The bytes of a token, also where they are no whole character."""
        return self.spellings.get(token_id) or text.encode()

    def token_text(self, token_id: int) -> str:
        """The text of a token alone."""
        return self.llm.get_tokenizer().token_text(token_id)

    def check_name(self, asked: str | None) -> None:
        """Raise `ApiError` (404) unless `asked` is this model, or nothing."""
        if asked not in (None, self.name, self.root):
            raise ApiError(
                404,
                f"model: {asked!r:.200} is not served here; use {self.name!r}",
                param="model",
                code="model_not_found",
            )

    async def engine_metrics(self) -> list[Metric]:
        """The engine's counters and gauges; none after its end, and while a step does not let it answer."""
        try:
            snapshot = await asyncio.wait_for(self.engine.ask(lambda engine: engine.snapshot()), MOST_METRICS_WAIT_S)
        except (EngineEndedError, TimeoutError):
            return []
        return snapshot.metrics()

    async def finish_files(self, output: RequestOutput) -> None:
        """Wait until the hidden states of an ended request are in their files; see `Engine.finish_files`."""
        finish = partial(self.llm.engine.finish_files, output)
        await asyncio.get_running_loop().run_in_executor(self._threads, finish)

    @property
    def kv_memory(self) -> tuple[int, int]:
        """The KV memory: (bytes, tokens)."""
        pool, cache = self.llm.engine.parts.pool, self.llm.executor.cache
        return cache.num_bytes, pool.num_blocks * cache.block_size

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Run what may take long and has nothing to do with the engine, whose requests do not wait for it."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenization_threads, function)

    async def submit(
        self,
        tokenise: Tokenise,
        sampling: SamplingParams,
        *,
        num_prompts: int,
        streams: bool,
        cache_salt: str | None,
        refine: Refine | None = None,
    ) -> Submission:
        """Put prompts into the engine; where this is cancelled before a thread has begun with them, none will.

        Raises:
            ApiError: there is no room, or the engine has ended.
            RequestError: a prompt or a sampling value does not fit; nothing is in the engine then.
        """
        num_completions = num_prompts * sampling.n
        leave = partial(self.admission.leave, num_completions)
        self.admission.enter(num_completions)
        threads = self._threads if sampling.structured_outputs is None else self._grammar_threads
        try:
            work = threads.submit(self._accept, tokenise, sampling, cache_salt, refine)
            accepting = asyncio.wrap_future(work)
            try:
                requests = await asyncio.shield(accepting)
            except asyncio.CancelledError:
                if not work.cancel():  # the thread goes on, and nobody will submit what it accepts
                    accepting.add_done_callback(self._withdraw_accepted)
                raise
            try:
                return Submission(self.engine, requests, streams=streams, when_closed=leave)
            except BaseException:
                self._withdraw(requests)
                raise
        except BaseException as error:
            leave()
            if isinstance(error, EngineEndedError):
                raise ApiError(503, str(error)) from error
            raise

    def _observe(self, deltas: Sequence[StreamDelta], finished: Sequence[RequestOutput], now: float) -> None:
        if self.request_log is not None:
            self.request_log.add(finished)
        self.metrics.observe(deltas, finished, now)

    def _accept(
        self, tokenise: Tokenise, sampling: SamplingParams, cache_salt: str | None, refine: Refine | None
    ) -> list[EngineRequest]:
        """Accept the prompts of one HTTP request, all or none; they share its turn at the running places."""
        requests: list[EngineRequest] = []
        prompts = tokenise()
        if refine is not None:
            sampling = refine(sampling)
        try:
            for text, ids in prompts:
                request_id = f"{next(self._ids)}"
                request = EngineRequest(
                    request_id=request_id,
                    prompt_ids=ids,
                    sampling=sampling,
                    prompt=text,
                    cache_salt=cache_salt,
                    group=requests[0].request_id if requests else request_id,
                )
                self.engine.engine.accept(request)
                requests.append(request)
                if self.request_log is not None:
                    self.request_log.note(request_id, cache_salt)
        except BaseException:
            self._withdraw(requests)
            raise
        return requests

    def _withdraw(self, requests: Sequence[EngineRequest]) -> None:
        for request in requests:
            self.engine.engine.withdraw(request.request_id)
            if self.request_log is not None:
                self.request_log.forget(request.request_id)

    def _withdraw_accepted(self, accepting: asyncio.Future[list[EngineRequest]]) -> None:
        if not accepting.cancelled() and accepting.exception() is None:
            self._withdraw(accepting.result())

    def close(self) -> None:
        """End the engine's thread and the others."""
        self.engine.stop()
        if self.request_log is not None:
            self.request_log.close()
        for threads in (self._threads, self._tokenization_threads, self._grammar_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        self.templates.close()


class Admission:
    """Counts the completions that are in the server, from before they are tokenised to their end.

    A request comes in as long as there is any room, so that one of many completions can always be
    served; the limit is overshot by one request at most.
    """

    def __init__(self, *, most: int) -> None:
        self._most = most
        self.num_inside = 0

    def enter(self, num_completions: int) -> None:
        """Count completions in.

        Raises:
            ApiError: 429, there is no room.
        """
        if self.num_inside >= self._most:
            raise ApiError(
                429,
                f"the queue is full ({self.num_inside} completions run or wait); try again later",
                code="queue_full",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        self.num_inside += num_completions

    def leave(self, num_completions: int) -> None:
        """Count completions out."""
        self.num_inside -= num_completions


class Submission:
    """The prompts of one HTTP request in the engine, and what it gives to them; read from the event loop.

    Must be closed, whatever happens: that frees what the engine still holds for it.
    """

    def __init__(
        self, engine: EngineThread, requests: Sequence[EngineRequest], *, streams: bool, when_closed: Callable[[], None]
    ) -> None:
        self.streams = streams
        self.prompts = [request.prompt or "" for request in requests]
        self.prompt_ids = [list(request.prompt_ids) for request in requests]
        self._prompt_logprobs: list[list[TokenLogprobs | None]] = [[] for _ in requests]
        self._engine = engine
        self._when_closed = when_closed
        self._unfinished = {request.request_id: place for place, request in enumerate(requests)}
        self._outputs: list[RequestOutput | None] = [None] * len(requests)
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._is_closed = False
        engine.submit(requests, self)

    def take(self, event: Event) -> None:
        """Take what the engine gives (see `Reader`)."""
        self._events.put_nowait(event)

    async def deltas(self) -> AsyncIterator[tuple[int, StreamDelta]]:
        """(place of the prompt, delta) as steps give them, until all completions have ended.

        Raises:
            ApiError: the engine failed, or ended one of the requests with an error that is not the client's.
            RequestError: it ended one with an error that is.
        """
        while self._unfinished:
            event = await self._events.get()
            if isinstance(event, EngineEndedError):
                raise ApiError(503, str(event))
            if isinstance(event, EngineError):
                raise ApiError(500, f"{event}; the server's log has the reason")
            if event.prompt_logprobs is not None:
                self._prompt_logprobs[self._unfinished[event.request_id]] = event.prompt_logprobs
            if isinstance(event, RequestOutput):
                self._outputs[self._unfinished.pop(event.request_id)] = event
                if event.error is not None:
                    raise failed_while_running(event.error, event.error_kind)
            elif event.finish_reason != "error":
                yield self._unfinished[event.request_id], event

    def prompt_logprobs(self, place: int) -> list[TokenLogprobs | None]:
        """Of a prompt's tokens, where they are asked for; whole from the prompt's first delta on."""
        return self._prompt_logprobs[place]

    @property
    def outputs(self) -> list[RequestOutput]:
        """Each prompt's whole output, once `deltas` is exhausted."""
        return [output for output in self._outputs if output is not None]

    def close(self) -> None:
        """Abort what runs and let others in; doing so again changes nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._when_closed()
        if self._unfinished:
            with suppress(EngineEndedError):  # it has ended, and holds nothing
                self._engine.abort(list(self._unfinished))


async def served_model(request: Request) -> ServedModel:
    """The model, for an endpoint that needs one.

    Raises:
        ApiError: 503, it is still loading.
    """
    model: ServedModel | None = request.app.state.model
    if model is None:
        raise ApiError(503, "the model is loading; try again later", headers={"Retry-After": str(RETRY_AFTER_S)})
    return model
