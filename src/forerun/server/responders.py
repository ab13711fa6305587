"""Answers over HTTP: one way from what the engine gives to JSON, whole or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.types import Message, Receive, Scope, Send

from forerun.core.outputs import CompletionOutput, Logprob, RequestOutput, StreamDelta
from forerun.errors import ForerunError, RequestError
from forerun.models.tokenizer import TextStream
from forerun.server.errors import ApiError, cut_off, refused
from forerun.server.json_parts import to_json, to_json_in_parts
from forerun.server.origins import Origins, joined, speculation_metrics
from forerun.server.protocol import GenerationBody, StreamOptions
from forerun.server.request_params import in_clients_words
from forerun.server.served_model import ServedModel, Submission

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0  # what vLLM writes for -inf, which JSON has no number for

LINE_ENDS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""Unicode's that JSON leaves as they are -> how they are written in its strings."""

CLIENT_CLOSED_REQUEST = 499  # nginx's number; nobody reads it


class CompletionTokensDetails(BaseModel):
    """How many tokens are reasoning, where that is taken apart, and what became of those drafted from a request's prediction."""

    reasoning_tokens: int | None = None
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class PromptTokensDetails(BaseModel):
    """How many tokens of the prompts were in the prefix cache."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens read and written; details of those written are there where there are any."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class Choice(BaseModel):
    """One of an answer's completions."""

    index: int
    finish_reason: str
    stop_reason: int | str | None
    logprobs: dict[str, Any] | None


class Responder(ABC):
    """Answers one HTTP request with what the engine gives, whole or as a stream; the shape is that of the subclass."""

    def __init__(self, *, streams: bool) -> None:
        self._streams = streams

    @abstractmethod
    async def whole(self, submission: Submission) -> bytes:
        """The JSON of the whole answer."""

    @abstractmethod
    def events(self, submission: Submission) -> AsyncIterator[bytes]:
        """The events of a stream, as they come."""

    @abstractmethod
    def failure(self, error: ApiError) -> bytes:
        """The events that end a stream which has begun and cannot go on."""

    @abstractmethod
    def in_clients_words(self, error: ForerunError) -> ForerunError:
        """The error with the field's name as the client wrote it."""

    @property
    def wants_steps(self) -> bool:
        """Whether the answer is made of single steps."""
        return self._streams

    async def respond(self, request: Request, submitting: Coroutine[Any, Any, Submission]) -> Response:
        """The answer to prompts that are submitted now; the engine's part is released when it has been given, or the client goes.

        Raises:
            ApiError, RequestError: they are refused.
        """
        try:
            submission = await unless_gone(request, submitting)
        except DisconnectError:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        if self._streams:
            return EventStream(self._events_to_the_end(submission), fail=self.failure, end=submission.close)
        try:
            return Response(await unless_gone(request, self.whole(submission)), media_type="application/json")
        except DisconnectError:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        finally:
            submission.close()

    async def _events_to_the_end(self, submission: Submission) -> AsyncGenerator[bytes, None]:
        try:
            async for events in self.events(submission):
                yield events
        except ApiError as error:
            yield self.failure(error)
        except RequestError as error:
            yield self.failure(refused(self.in_clients_words(error)))


class ResponseBuilder(Responder):
    """Writes OpenAI's answers, which consist of choices; one object per HTTP request.

    A choice's index is its prompt's place times n plus its own index.
    """

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, body: GenerationBody, model: ServedModel) -> None:
        super().__init__(streams=bool(body.stream))
        self.model = model
        self._body = body
        self._num_completions, self._wants_origins = body.num_completions, bool(body.own.origins)
        self._origins: dict[int, Origins] = {}
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model.name}

    @abstractmethod
    def choice(self, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        """A whole choice, but for what all endpoints add; it may give another reason for the end."""

    @abstractmethod
    def chunk_choice(self, place: int, delta: StreamDelta, submission: Submission, *, is_first: bool) -> dict[str, Any]:
        """A chunk's only choice, but for what all endpoints add; it may give another reason for the end."""

    def prompt_ids_of(self, submission: Submission) -> dict[str, Any]:  # noqa: ARG002
        """What a whole answer says of its prompts outside of its choices."""
        return {}

    def num_reasoning_tokens(self, completion: CompletionOutput) -> int | None:  # noqa: ARG002
        """How many tokens of a completion that was written are reasoning; None where none is taken apart."""
        return None

    def in_clients_words(self, error: ForerunError) -> ForerunError:
        """The error with the field's name as the client wrote it."""
        return in_clients_words(error, self._body)

    @property
    def wants_steps(self) -> bool:
        """Whether the answer is made of single steps."""
        return bool(self._streams or self._wants_origins or reports_steps(self.model))

    async def whole(self, submission: Submission) -> bytes:
        """The JSON of a whole answer, choice by choice: the event loop has others to serve, also while log probabilities are written."""
        steps = list[StreamDelta]()
        origins = defaultdict[int, list[dict[str, Any]]](list)  # by index
        async for place, delta in submission.deltas():  # spread over the steps, as the event loop has others to serve
            if reports_steps(self.model):
                steps.append(delta)
            if self._wants_origins:
                index = self._index(place, delta.index)
                origins[index].append(self._origins_of(index, submission.prompt_ids[place]).of(delta))
        outputs = submission.outputs
        saved = await self._saved(outputs)
        choices = list[str]()
        for place, output in enumerate(outputs):
            for completion in output.outputs:
                ended = (place, output, completion, origins)
                if completion.logprobs is None:
                    choices.append(self._written_choice(*ended))
                    await asyncio.sleep(0)
                else:
                    choices.append(await asyncio.to_thread(self._written_choice, *ended))
        head = to_json({**self._head, "object": self.whole_object})
        tail = to_json(
            {
                "usage": usage_of(outputs, self.num_reasoning_tokens),
                **self.prompt_ids_of(submission),
                **metrics_of(self.model, outputs, steps),
                **saved,
            }
        )
        return f'{head[:-1]},"choices":[{",".join(choices)}],{tail[1:]}'.encode()

    async def _saved(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """vLLM's `kv_transfer_params` of the first prompt, where hidden states are saved, once the files are complete."""
        if not self.model.saves_hidden_states:
            return {}
        for output in outputs:
            await self.model.finish_files(output)
        return {"kv_transfer_params": outputs[0].kv_transfer_params}

    def _written_choice(
        self,
        place: int,
        output: RequestOutput,
        completion: CompletionOutput,
        origins: Mapping[int, Sequence[dict[str, Any]]],
    ) -> str:
        choice = {
            "index": self._index(place, completion.index),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            **self.choice(output, completion),
        }
        if self._body.return_token_ids:
            choice["token_ids"] = completion.token_ids
        if self._wants_origins:
            choice["forerun"] = joined(origins[choice["index"]] if completion.token_ids else ())
        return to_json_in_parts(choice)

    async def events(self, submission: Submission) -> AsyncIterator[bytes]:
        """Chunks with a choice each, then the usage where it is asked for."""
        options = self._body.stream_options or StreamOptions()
        wants_usage, counts_on = options.include_usage, options.include_usage and options.continuous_usage_stats
        num_prompt_tokens = sum(map(len, submission.prompt_ids))
        num_tokens, started, steps = 0, set[int](), list[StreamDelta]()
        async for place, delta in submission.deltas():
            index = self._index(place, delta.index)
            num_tokens += len(delta.token_ids)
            is_first = index not in started
            make = partial(self._chunk_choice, place, delta, submission, is_first=is_first)
            is_long = is_first and bool(submission.prompt_logprobs(place))  # all of them are echoed
            choice = await asyncio.to_thread(make) if is_long else make()
            chunk = {**self._head, "object": self.chunk_object, "choices": [choice]}
            if not started:
                chunk |= self.prompt_ids_of(submission)
            if counts_on:
                chunk["usage"] = _usage(num_prompt_tokens, num_tokens)
            elif wants_usage:
                chunk["usage"] = None
            started.add(index)
            if reports_steps(self.model):
                steps.append(delta)
            yield await asyncio.to_thread(event, chunk, write=to_json_in_parts) if is_long else event(chunk)
        if wants_usage:
            tail = {
                "object": self.chunk_object,
                "choices": [],
                "usage": usage_of(submission.outputs, self.num_reasoning_tokens),
            }
            yield event({**self._head, **tail, **metrics_of(self.model, submission.outputs, steps)})
        yield DONE

    def failure(self, error: ApiError) -> bytes:
        """An error in the place of a chunk."""
        return event(error.body) + DONE

    def _chunk_choice(
        self, place: int, delta: StreamDelta, submission: Submission, *, is_first: bool
    ) -> dict[str, Any]:
        index = self._index(place, delta.index)
        choice = {
            "index": index,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            **self.chunk_choice(place, delta, submission, is_first=is_first),
        }
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        if self._wants_origins:
            choice["forerun"] = self._origins_of(index, submission.prompt_ids[place]).of(delta)
        return choice

    def _index(self, place: int, index: int) -> int:
        return place * self._num_completions + index

    def _origins_of(self, index: int, prompt_ids: list[int]) -> Origins:
        if index not in self._origins:
            skips = self._body.skip_special_tokens is not False
            text = TextStream(self.model.llm.get_tokenizer(), prompt_ids, skip_special_tokens=skips)
            self._origins[index] = Origins(text.push)
        return self._origins[index]


def reports_steps(model: ServedModel) -> bool:
    """Whether answers report what each step drafted."""
    return model.options.per_request_spec_decode_metrics == "detailed"


def metrics_of(model: ServedModel, outputs: list[RequestOutput], steps: list[StreamDelta]) -> dict[str, Any]:
    """vLLM's `metrics` of a whole answer, where anything is drafted; null where there are several completions, as there."""
    if not model.speculates or model.options.per_request_spec_decode_metrics == "none":
        return {}
    if len(outputs) > 1 or len(outputs[0].outputs) > 1:
        return {"metrics": None}
    counts = speculation_metrics(
        outputs[0].speculation,
        num_speculative_tokens=model.llm.speculative.num_speculative_tokens,
        steps=steps if reports_steps(model) else None,
    )
    return {"metrics": {"speculative_decoding": counts}}


def usage_of(
    outputs: list[RequestOutput], num_reasoning_tokens: Callable[[CompletionOutput], int | None]
) -> dict[str, Any]:
    """Tokens read and written by a whole answer, and OpenAI's counts of its reasoning and of its prediction."""
    completions = [completion for output in outputs for completion in output.outputs]
    num_read = sum(len(output.prompt_token_ids) for output in outputs)
    num_written = sum(len(completion.token_ids) for completion in completions)
    num_cached = sum(output.num_cached_tokens or 0 for output in outputs)
    usage: dict[str, Any] = _usage(num_read, num_written) | {"prompt_tokens_details": {"cached_tokens": num_cached}}
    details = {}
    reasoned = [count for count in map(num_reasoning_tokens, completions) if count is not None]
    if reasoned:
        details["reasoning_tokens"] = sum(reasoned)
    predicted = [completion.prediction for completion in completions if completion.prediction is not None]
    if predicted:
        details["accepted_prediction_tokens"] = sum(counts.num_accepted_tokens for counts in predicted)
        details["rejected_prediction_tokens"] = sum(counts.num_rejected_tokens for counts in predicted)
    return usage | ({"completion_tokens_details": details} if details else {})


def _usage(num_read: int, num_written: int) -> dict[str, int]:
    return {"prompt_tokens": num_read, "completion_tokens": num_written, "total_tokens": num_read + num_written}


def json_logprob(entry: Logprob) -> float:
    """The target's log probability of a token, as a number that JSON can hold."""
    return max(entry.logprob, LEAST_LOGPROB)


def logprob_text(entry: Logprob, token_id: int) -> str:
    """The text of a token whose logprob is reported; its id where the text is not known."""
    return f"token_id:{token_id}" if entry.decoded_token is None else entry.decoded_token


class DisconnectError(Exception):
    """The client has gone."""


def event(data: dict[str, Any], *, write: Callable[[Any], str] = to_json) -> bytes:
    """One event of a stream: one line also for who takes Unicode's line ends for such."""
    line = write(data)
    for character, escaped in LINE_ENDS.items():
        line = line.replace(character, escaped)  # `str.translate` would take ten times as long as the JSON
    return b"data: %b\n\n" % line.encode()


class EventStream(StreamingResponse):
    """Events as they come, until the client goes, whether there is something to send or not; then `end` is called.

    A stream that the server's shutdown cuts off ends with the events that `fail` gives for that error.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], *, fail: Callable[[ApiError], bytes], end: Callable[[], None]
    ) -> None:
        super().__init__(
            events,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._events = events
        self._fail = fail
        self._end = end  # not left to the generator: one that was never begun has nothing to clear away

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send the events."""
        is_open = False

        async def noting_send(message: Message) -> None:
            nonlocal is_open
            is_open = message["type"] == "http.response.start" or message.get("more_body", False)
            await send(message)

        try:
            await _unless_gone(receive, self.stream_response(noting_send))
        except (DisconnectError, OSError):
            pass  # sending to a client that went away may say so first
        except asyncio.CancelledError:
            if not is_open:
                raise
            await send({"type": "http.response.body", "body": self._fail(cut_off()), "more_body": False})
        finally:
            self._end()
            await self._events.aclose()


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes.

    Raises:
        DisconnectError: it went.
    """
    return await _unless_gone(request.receive, work)


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    working, watching = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise DisconnectError
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
