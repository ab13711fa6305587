"""The FastAPI application put together: routes, keys, middleware and the shape of errors."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from fastapi import Depends, FastAPI
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import forerun
from forerun.ops.native.memory import give_back_freed_memory
from forerun.server import chat, completions, errors, messages, page, responses, status, tokenization
from forerun.server.auth import Keys
from forerun.server.errors import RETRY_AFTER_S, ApiError
from forerun.server.options import ServerOptions

MOST_BODY_BYTES = 4 << 20
MOST_HELD_BYTES = 256 << 20  # of all bodies that the server holds at once; parsed they take several times as much
LARGE_BODY_BYTES = 1 << 20  # from which on the memory that it took is given back at its end
MOST_HEADER_BYTES = 32 << 10
REQUEST_ID = b"x-request-id"
SANE_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")  # any other id is replaced, as ids go into headers and logs

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def build_app(options: ServerOptions, *, host: str | None = None, lifespan: Lifespan | None = None) -> FastAPI:
    """The application; `app.state.model` is None until there is a `ServedModel`.

    `host` is the address that this process listens on; None where others listen for it.
    `app.state.read_metrics` may be set to what gives the text of /metrics instead of this server's own.
    Every route lets in whom `Keys` does, unless its endpoint is marked `open_to_all`. No
    other origin may read answers (there are no CORS headers), and no page is loaded from elsewhere.
    """
    keys = Keys(options.api_key, host=host)
    app = FastAPI(
        title="forerun",
        version=forerun.__version__,
        dependencies=[Depends(keys)],
        responses=errors.ERRORS,
        lifespan=lifespan,
        openapi_url=None,  # FastAPI's own route would answer without a key; `status` has one that does not
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # the address would be made of the Host header, which anybody writes
    )
    app.add_middleware(BodyGuard, keys=keys)
    app.state.model = None
    app.state.read_metrics = None
    errors.install(app)
    for module in (status, completions, chat, responses, messages, tokenization, page):
        app.include_router(module.router)
    if options.enable_tokenizer_info_endpoint:
        app.include_router(tokenization.info_router)
    return app


class Edge:
    """Gives every request an id, and answers those that the shutdown cuts off.

    The id is the client's x-request-id, if that is sane, else a new one; `request.state.request_id` holds
    it, and the answer's header repeats it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == REQUEST_ID), b"")
        request_id = given if SANE_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        has_begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                message = {**message, "headers": [*message.get("headers", ()), (REQUEST_ID, request_id)]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:
            if not has_begun:
                await errors.cut_off().response(scope)(scope, receive, send_with_id)


class BodyGuard:
    """Refuses bodies of whom `Keys` does not let in, bodies that are too large, and too many at once.

    It checks when the endpoint begins to read, so a body that is refused is not read at all.
    """

    def __init__(self, app: ASGIApp, *, keys: Keys) -> None:
        self._app = app
        self._keys = keys
        self._num_held = 0  # bytes of the bodies of all requests that are being read or answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, or answer 401, 403, 413, 429 or 431."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MOST_HEADER_BYTES:
            refusal = ApiError(431, f"headers: must be at most {MOST_HEADER_BYTES} bytes")
            await refusal.response(scope)(scope, receive, send)
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
            if num_bytes >= LARGE_BODY_BYTES:  # read and made into tokens it took many times as much
                await asyncio.to_thread(give_back_freed_memory)


def _announced(scope: Scope) -> int:
    """The body's length, as far as the headers say it."""
    return int(Headers(scope=scope).get("content-length", "0"))  # checked by h11


def _check_size(num_bytes: int) -> None:
    if num_bytes > MOST_BODY_BYTES:
        raise ApiError(413, f"body: must be at most {MOST_BODY_BYTES} bytes")
