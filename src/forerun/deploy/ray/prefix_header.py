"""What Ray's HTTP proxy runs before it routes: the prompt's prefix goes into a header, where the router reads it.

A router sees a request's headers and not its body, so the body is read here, and handed on as it was. Ray loads
`middlewares` in each proxy where RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names it.
"""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.deploy.ray.prompt_prefix import prefix_of_body

IMPORT_PATH = "forerun.deploy.ray.prefix_header:middlewares"
IMPORT_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"

PREFIX_HEADER = b"x-forerun-prefix"
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
MOST_BODY_BYTES = 1 << 20
"""Of a body that is read for its prefix; requests with more are routed by load alone."""


def middlewares() -> list[Middleware]:
    """What Ray puts before its proxy."""
    return [Middleware(PrefixHeader)]


class PrefixHeader:
    """Puts the prefix of each prompt into a header of its request; a client's own header of that name is dropped."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = [(name, value) for name, value in scope["headers"] if name != PREFIX_HEADER]
        scope = {**scope, "headers": headers}
        if scope["method"] != "POST" or not scope["path"].endswith(PATHS):
            await self._app(scope, receive, send)
            return
        messages, body = await _read_body(receive)
        if body is not None and (prefix := prefix_of_body(body)) is not None:
            headers.append((PREFIX_HEADER, prefix.to_header()))
        unread = iter(messages)

        async def replay() -> Message:
            """The messages that were read, then those that come."""
            message = next(unread, None)
            return await receive() if message is None else message

        await self._app(scope, replay, send)


async def _read_body(receive: Receive) -> tuple[list[Message], bytes | None]:
    """The messages up to the body's end, and the body; None where it is too large, or the client has gone."""
    messages: list[Message] = []
    num_bytes = 0
    while True:
        message = await receive()
        messages.append(message)
        if message["type"] != "http.request":
            return messages, None
        num_bytes += len(message.get("body", b""))
        if num_bytes > MOST_BODY_BYTES:
            return messages, None
        if not message.get("more_body", False):
            return messages, b"".join(one.get("body", b"") for one in messages)
