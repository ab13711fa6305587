"""What one request may ask for, and how many may wait."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.server.errors import ApiError

MOST_BODY_BYTES = 4 << 20
MOST_HEADER_BYTES = 32 << 10
MOST_COMPLETIONS = 16  # n
MOST_PROMPTS = 64
MOST_STOPS = 16  # OpenAI takes 4; code tasks of evaluations have more
MOST_STOP_CHARACTERS = 1024  # of one; each is looked for after every token
MOST_MESSAGES = 2048
MOST_LOGPROBS = 20
MOST_TOKEN_IDS = 1 << 16  # of stop_token_ids, allowed_token_ids
MOST_BIASES = 1024
MOST_BAD_WORDS = 256
MOST_BAD_WORD_CHARACTERS = 256
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


class SizeLimits:
    """Refuses headers and bodies that are too large, a body as soon as its length says so or so much has come."""

    def __init__(self, app: ASGIApp, *, most_header_bytes: int, most_body_bytes: int) -> None:
        self._app = app
        self._most_header_bytes = most_header_bytes
        self._most_body_bytes = most_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, or answer 413 or 431."""
        refusal = self._refusal(scope["headers"]) if scope["type"] == "http" else None
        if refusal is not None:
            await refusal.response()(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._most_body_bytes:
                raise HTTPException(413, f"body: must be at most {self._most_body_bytes} bytes")
            return message

        await self._app(scope, counted, send)

    def _refusal(self, headers: Sequence[tuple[bytes, bytes]]) -> ApiError | None:
        if sum(len(name) + len(value) for name, value in headers) > self._most_header_bytes:
            return ApiError(431, f"headers: must be at most {self._most_header_bytes} bytes")
        length = next((int(value) for name, value in headers if name == b"content-length"), 0)  # checked by h11
        if length > self._most_body_bytes:
            return ApiError(413, f"body: must be at most {self._most_body_bytes} bytes")
        return None
