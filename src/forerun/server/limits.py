"""What one request may ask for, and how many may wait."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.server.errors import ApiError

MOST_BODY_BYTES = 4 << 20
MOST_HEADER_BYTES = 32 << 10
MOST_COMPLETIONS = 16  # n
MOST_PROMPTS = 64
MOST_STOPS = 4
MOST_MESSAGES = 2048
MOST_LOGPROBS = 20
MOST_TOKEN_IDS = 1 << 16  # of stop_token_ids, allowed_token_ids
MOST_BIASES = 1024
MOST_BAD_WORDS = 256
LARGEST_BIAS = 100.0  # OpenAI's range
RETRY_AFTER_S = 1


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


class BodyLimit:
    """Refuses bodies of more than `most` bytes, as soon as their length says so or so many have come."""

    def __init__(self, app: ASGIApp, *, most: int) -> None:
        self._app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, or answer 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if _announced_length(scope) > self._most:
            error = ApiError(413, f"body: must be at most {self._most} bytes")
            await error.response()(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._most:
                raise HTTPException(413, f"body: must be at most {self._most} bytes")
            return message

        await self._app(scope, counted, send)


def _announced_length(scope: Scope) -> int:
    """What Content-Length says; h11 has checked that it is a number."""
    return next((int(value) for name, value in scope["headers"] if name == b"content-length"), 0)
