"""Limits: what one request may ask for, how large bodies may be, and how many completions may wait."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.server.auth import Keys
from forerun.server.errors import ApiError

MOST_BODY_BYTES = 4 << 20
MOST_HELD_BYTES = 256 << 20  # of all bodies at once; parsed they take several times as much
MOST_HEADER_BYTES = 32 << 10
MOST_COMPLETIONS = 16  # n
MOST_PROMPTS = 64
MOST_STOPS = 16  # OpenAI takes 4; code tasks of evaluations have more
MOST_STOP_CHARACTERS = 1024  # of one; each is looked for after every token
MOST_MESSAGES = 2048
MOST_LOGPROBS = 20
MOST_TOOLS = 128  # OpenAI's
MOST_CALLS = 128  # of one message
MOST_TOOL_DEPTH = 64  # brackets within brackets, of a schema or of arguments
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


class BodyGuard:
    """Refuses bodies without a key, bodies that are too large, and too many at once.

    It checks when the endpoint begins to read, so a body that is refused is not read at all.
    """

    def __init__(self, app: ASGIApp, *, keys: Keys) -> None:
        self._app = app
        self._keys = keys
        self._num_held = 0  # bytes of the bodies of all requests that are being read or answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, or answer 401, 413, 429 or 431."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MOST_HEADER_BYTES:
            refusal = ApiError(431, f"headers: must be at most {MOST_HEADER_BYTES} bytes")
            await refusal.response()(scope, receive, send)
            return
        is_welcome, num_bytes = False, 0

        async def guarded() -> Message:
            nonlocal is_welcome, num_bytes
            if not is_welcome:
                self._keys.check(scope)
                _check_size(_announced(scope))
                is_welcome = True
            message = await receive()
            size = len(message.get("body", b""))
            num_bytes += size
            self._num_held += size
            _check_size(num_bytes)
            if self._num_held > MOST_HELD_BYTES:
                raise ApiError(
                    429,
                    "body: the server holds too many large ones; try again later",
                    code="queue_full",
                    headers={"Retry-After": str(RETRY_AFTER_S)},
                )
            return message

        try:
            await self._app(scope, guarded, send)
        finally:
            self._num_held -= num_bytes


def _announced(scope: Scope) -> int:
    """The body's length, as far as the headers say it."""
    return int(Headers(scope=scope).get("content-length", "0"))  # checked by h11


def _check_size(num_bytes: int) -> None:
    if num_bytes > MOST_BODY_BYTES:
        raise ApiError(413, f"body: must be at most {MOST_BODY_BYTES} bytes")
