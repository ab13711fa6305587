"""Server-sent events, and clients that go away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from forerun.server.errors import cut_off

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"

_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # `json.dumps` makes one each time


class DisconnectError(Exception):
    """Nobody waits for the answer any more."""


def event(data: dict[str, Any]) -> bytes:
    """One event of a stream."""
    return b"data: %b\n\n" % _to_json(data).encode()


class EventStream(StreamingResponse):
    """Events as they come, until the client goes, whether there is something to send or not; then `end` is called.

    A stream that the server's shutdown cuts off ends with an error event and [DONE].
    """

    def __init__(self, events: AsyncGenerator[bytes, None], *, end: Callable[[], None]) -> None:
        super().__init__(
            events,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._events = events
        self._end = end  # not left to the generator: one that was never begun has nothing to clear away

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send the events."""
        has_begun = False

        async def noting_send(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await _unless_gone(receive, self.stream_response(noting_send))
        except (DisconnectError, OSError):
            pass  # sending to a client that went away may say so first
        except asyncio.CancelledError:
            if not has_begun:
                raise
            await send({"type": "http.response.body", "body": event(cut_off().body) + DONE, "more_body": False})
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
