"""What completions and chat completions share: one way from the engine's answers to JSON, whole or streamed."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from forerun.core.outputs import CompletionOutput, RequestOutput, StreamDelta
from forerun.models.tokenizer import TextStream
from forerun.server.answers import Answers
from forerun.server.errors import ApiError
from forerun.server.origins import Origins, joined, speculation_metrics
from forerun.server.protocol import GenerationBody
from forerun.server.served_model import ServedModel
from forerun.server.streaming import DONE, DisconnectError, EventStream, event, unless_gone

CLIENT_CLOSED_REQUEST = 499  # nginx's number; nobody reads it


class Shape(ABC):
    """How one endpoint writes its answers; one object per HTTP request.

    A choice's index is its prompt's place times n plus its own index.
    """

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, body: GenerationBody, model: ServedModel) -> None:
        self.model = model
        self._body = body
        self._num_completions, self._wants_origins = body.num_completions, bool(body.own.origins)
        self._origins: dict[int, Origins] = {}
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model.name}

    @abstractmethod
    def choice(self, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        """A whole choice, but for what all endpoints add; it may give another reason for the end."""

    @abstractmethod
    def chunk_choice(self, place: int, delta: StreamDelta, answers: Answers, *, is_first: bool) -> dict[str, Any]:
        """A chunk's only choice, but for what all endpoints add; it may give another reason for the end."""

    def prompt_ids_of(self, answers: Answers) -> dict[str, Any]:  # noqa: ARG002
        """What a whole answer tells of its prompts outside of its choices."""
        return {}

    @property
    def wants_steps(self) -> bool:
        """Whether the answer tells of single steps."""
        return bool(self._body.stream or self._wants_origins or self._tells_steps)

    @property
    def _tells_steps(self) -> bool:
        return self.model.options.per_request_spec_decode_metrics == "detailed"

    async def respond(self, request: Request, answers: Answers) -> Response:
        """The answer; the engine's part of it is released when it has been given, or the client goes."""
        if self._body.stream:
            return EventStream(self._events(answers), end=answers.close)
        try:
            return JSONResponse(await unless_gone(request, self._whole(answers)))
        except DisconnectError:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        finally:
            answers.close()

    async def _whole(self, answers: Answers) -> dict[str, Any]:
        steps = [(place, delta) async for place, delta in answers.deltas()]
        outputs = answers.outputs
        saved = await self._saved(outputs)
        choices = [self._finished_choice(p, o, c, steps) for p, o in enumerate(outputs) for c in o.outputs]
        return {
            **self._head,
            "object": self.whole_object,
            "choices": choices,
            "usage": usage_of(outputs),
            **self.prompt_ids_of(answers),
            **self._metrics(outputs, [delta for _, delta in steps]),
            **saved,
        }

    async def _saved(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """vLLM's `kv_transfer_params` of the first prompt, where hidden states are saved, once the files are complete."""
        if not self.model.saves_hidden_states:
            return {}
        for output in outputs:
            await self.model.finish_files(output)
        return {"kv_transfer_params": outputs[0].kv_transfer_params}

    def _finished_choice(
        self, place: int, output: RequestOutput, completion: CompletionOutput, steps: list[tuple[int, StreamDelta]]
    ) -> dict[str, Any]:
        choice = {
            "index": self._index(place, completion.index),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            **self.choice(output, completion),
        }
        if self._body.return_token_ids:
            choice["token_ids"] = completion.token_ids
        if self._wants_origins:
            mine = [delta for p, delta in steps if (p, delta.index) == (place, completion.index)]
            origins = self._origins_of(choice["index"], output.prompt_token_ids)
            choice["forerun"] = joined([origins.of(delta) for delta in mine])
        return choice

    async def _events(self, answers: Answers) -> AsyncGenerator[bytes, None]:
        options = self._body.stream_options
        wants_usage = bool(options and options.include_usage)
        counts_on = bool(options and options.continuous_usage_stats)
        num_prompt_tokens = sum(map(len, answers.prompt_ids))
        num_tokens, started, steps = 0, set[int](), list[StreamDelta]()
        try:
            async for place, delta in answers.deltas():
                index = self._index(place, delta.index)
                num_tokens += len(delta.token_ids)
                chunk = {
                    **self._head,
                    "object": self.chunk_object,
                    "choices": [self._chunk_choice(place, delta, answers, is_first=index not in started)],
                }
                if not started:
                    chunk |= self.prompt_ids_of(answers)
                if counts_on:
                    chunk["usage"] = _usage(num_prompt_tokens, num_tokens)
                elif wants_usage:
                    chunk["usage"] = None
                started.add(index)
                if self._tells_steps:
                    steps.append(delta)
                yield event(chunk)
            if wants_usage:
                tail = {"object": self.chunk_object, "choices": [], "usage": usage_of(answers.outputs)}
                yield event({**self._head, **tail, **self._metrics(answers.outputs, steps)})
        except ApiError as error:
            yield event(error.body)
        yield DONE

    def _chunk_choice(self, place: int, delta: StreamDelta, answers: Answers, *, is_first: bool) -> dict[str, Any]:
        index = self._index(place, delta.index)
        choice = {
            "index": index,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            **self.chunk_choice(place, delta, answers, is_first=is_first),
        }
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        if self._wants_origins:
            choice["forerun"] = self._origins_of(index, answers.prompt_ids[place]).of(delta)
        return choice

    def _index(self, place: int, index: int) -> int:
        return place * self._num_completions + index

    def _origins_of(self, index: int, prompt_ids: list[int]) -> Origins:
        if index not in self._origins:
            skips = self._body.skip_special_tokens is not False
            text = TextStream(self.model.llm.get_tokenizer(), prompt_ids, skip_special_tokens=skips)
            self._origins[index] = Origins(text.push, drafter=self.model.llm.speculative.method)
        return self._origins[index]

    def _metrics(self, outputs: list[RequestOutput], steps: list[StreamDelta]) -> dict[str, Any]:
        """vLLM's `metrics`, where anything is drafted; null where there are several completions, as there."""
        level = self.model.options.per_request_spec_decode_metrics
        if not self.model.speculates or level == "none":
            return {}
        if len(outputs) > 1 or self._num_completions > 1:
            return {"metrics": None}
        told = speculation_metrics(
            outputs[0].speculation,
            num_speculative_tokens=self.model.llm.speculative.num_speculative_tokens,
            steps=steps if self._tells_steps else None,
        )
        return {"metrics": {"speculative_decoding": told}}


def usage_of(outputs: list[RequestOutput]) -> dict[str, Any]:
    """Tokens read and written by a whole answer."""
    num_read = sum(len(output.prompt_token_ids) for output in outputs)
    num_written = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    num_cached = sum(output.num_cached_tokens or 0 for output in outputs)
    return _usage(num_read, num_written) | {"prompt_tokens_details": {"cached_tokens": num_cached}}


def _usage(num_read: int, num_written: int) -> dict[str, int]:
    return {"prompt_tokens": num_read, "completion_tokens": num_written, "total_tokens": num_read + num_written}
