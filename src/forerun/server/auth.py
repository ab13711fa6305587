"""API keys: every route asks for one unless it is marked as open."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import Scope

from forerun.server.errors import ApiError

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])

OPEN = "is_open_to_all"


def open_to_all(endpoint: Endpoint) -> Endpoint:
    """Mark an endpoint that answers without a key."""
    setattr(endpoint, OPEN, True)
    return endpoint


class Keys:
    """The keys that the server takes, as hashes; without any, everybody is served."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def accepts(self, given: str) -> bool:
        """Whether `given` is one of the keys; takes the same time whatever it is."""
        digest = _digest(given)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)

    def check(self, scope: Scope) -> None:
        """Raise `ApiError` (401) unless the request bears a key, or its endpoint is open to all.

        The function that will answer decides, not the spelling of the path.
        """
        if not self._digests or getattr(scope.get("endpoint"), OPEN, False):
            return
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not self.accepts(key.strip()):
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def __call__(self, request: Request) -> None:
        """`check` as a dependency of every route; those that read a body are asked before, by `app.BodyGuard`."""
        self.check(request.scope)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
