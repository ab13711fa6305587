"""Who is let in: with API keys those who bear one, without any those who call the server by a name of its own."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import Scope

from forerun.server.errors import ApiError

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])

OPEN = "is_open_to_all"
OWN_NAMES = (".localhost", ".internal")  # ends of names that no public DNS gives away; containers have the latter


def open_to_all(endpoint: Endpoint) -> Endpoint:
    """Mark an endpoint that answers without a key."""
    setattr(endpoint, OPEN, True)
    return endpoint


class Keys:
    """The keys that the server takes, as hashes; without any, everybody is served who reaches it.

    On a loopback address that would be every web page that this machine's browser shows: its site's name
    may come to mean that address once the page is there (DNS rebinding). So names of elsewhere are refused then.

    Args:
        keys: as requests must bear them.
        host: address that the process listens on; None where others listen for it.
    """

    def __init__(self, keys: Iterable[str], *, host: str | None = None) -> None:
        self._digests = [_digest(key) for key in keys]
        address = None if host is None else _address(host)
        self._is_local = host == "localhost" or (address is not None and address.is_loopback)

    def accepts(self, given: str) -> bool:
        """Whether `given` is one of the keys; takes the same time whatever it is."""
        digest = _digest(given)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)

    def check(self, scope: Scope) -> None:
        """Raise `ApiError` unless the endpoint is open to all, or the request bears a key (401), or needs none (403).

        The function that will answer decides, not the spelling of the path.
        """
        if getattr(scope.get("endpoint"), OPEN, False):
            return
        headers = Headers(scope=scope)
        if not self._digests:
            if self._is_local and not is_own_name(host := headers.get("host", "")):
                raise ApiError(
                    403,
                    f"Host: got {host!r:.80}; without keys must be localhost or an IP address; call the server so (a proxy must, "
                    "too), or start it with --api-key",
                )
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = (key.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""))
        are_keys = [self.accepts(one) for one in given]
        if not any(are_keys):
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def __call__(self, request: Request) -> None:
        """`check` as a dependency of every route; those that read a body are asked before, by `app.BodyGuard`."""
        self.check(request.scope)


def is_own_name(host: str) -> bool:
    """Whether a Host header names no site of elsewhere; browsers always send one."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return not name or f".{name}".endswith(OWN_NAMES) or _address(name) is not None


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
