"""One HTTP request's completions: its prompts in the engine, read from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

from forerun.core.outputs import RequestOutput, StreamDelta, TokenLogprobs
from forerun.engine.request import Request
from forerun.server.engine_thread import EngineEndedError, EngineError, EngineThread, Event
from forerun.server.errors import ApiError, failed_while_running


class Answers:
    """What the engine gives to the prompts of one HTTP request.

    Must be closed, whatever happens: that frees what the engine still holds for it.
    """

    def __init__(
        self, engine: EngineThread, requests: Sequence[Request], *, streams: bool, when_closed: Callable[[], None]
    ) -> None:
        self.streams = streams
        self.prompts = [request.prompt or "" for request in requests]
        self.prompt_ids = [request.prompt_ids for request in requests]
        self._requests = requests
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
            ApiError: the engine failed, or ended one of the requests with an error.
        """
        while self._unfinished:
            event = await self._events.get()
            if isinstance(event, EngineEndedError):
                raise ApiError(503, str(event))
            if isinstance(event, EngineError):
                raise ApiError(500, f"{event}; the server's log has the reason")
            if isinstance(event, RequestOutput):
                self._outputs[self._unfinished.pop(event.request_id)] = event
                if event.error is not None:
                    raise failed_while_running(event.error, event.error_kind)
            elif event.finish_reason != "error":
                yield self._unfinished[event.request_id], event

    def prompt_logprobs(self, place: int) -> list[TokenLogprobs | None]:
        """Of a prompt's tokens, where they are asked for; whole from the prompt's first delta on."""
        return self._requests[place].prompt_logprobs or []

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
