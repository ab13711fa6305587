"""The FastAPI application: routes, keys, limits and the shape of errors put together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from fastapi import Depends, FastAPI

import forerun
from forerun.server import chat, completions, errors, page, status, tokenization
from forerun.server.auth import Keys
from forerun.server.limits import BodyGuard
from forerun.server.options import ServerOptions
from forerun.server.replies import ERRORS

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def build_app(options: ServerOptions, *, lifespan: Lifespan | None = None) -> FastAPI:
    """The application; `app.state.model` is None until there is a `ServedModel`.

    Every route asks for a key, if there are any, unless its endpoint is marked `open_to_all`. No
    other origin may read answers (there are no CORS headers), and no page is loaded from elsewhere.
    """
    keys = Keys(options.api_key)
    app = FastAPI(
        title="forerun",
        version=forerun.__version__,
        dependencies=[Depends(keys)],
        responses=ERRORS,
        lifespan=lifespan,
        openapi_url=None,  # FastAPI's own route would answer without a key; `status` has one that does not
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # the address would be made of the Host header, which anybody writes
    )
    app.add_middleware(BodyGuard, keys=keys)
    app.state.model = None
    errors.install(app)
    for module in (status, completions, chat, tokenization, page):
        app.include_router(module.router)
    if options.enable_tokenizer_info_endpoint:
        app.include_router(tokenization.info_router)
    return app
