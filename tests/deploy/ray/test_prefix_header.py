"""What Ray's proxy runs before it routes."""

from __future__ import annotations

import asyncio
import json

import pytest

from forerun.deploy.ray.prefix_header import IMPORT_PATH, MOST_BODY_BYTES, PREFIX_HEADER, PrefixHeader, middlewares
from forerun.deploy.ray.prompt_prefix import PromptPrefix, prefix_of_body

BODY = json.dumps({"prompt": "x" * 1000}).encode()


def passed_on(body, *, path="/v1/completions", method="POST", headers=(), parts=1):
    """The header of a request, and its body, as they come through."""
    seen = {}

    async def app(scope, receive, send):
        seen["header"] = [value for name, value in scope["headers"] if name == PREFIX_HEADER]
        seen["body"] = b""
        more = True
        while more:
            message = await receive()
            seen["body"] += message.get("body", b"")
            more = message.get("more_body", False)

    size = max(1, -(-len(body) // parts))
    cut = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
    messages = iter(
        {"type": "http.request", "body": one, "more_body": number < len(cut) - 1} for number, one in enumerate(cut)
    )

    async def receive():
        return next(messages, {"type": "http.disconnect"})

    scope = {"type": "http", "method": method, "path": path, "headers": list(headers)}
    asyncio.run(PrefixHeader(app)(scope, receive, None))
    return seen["header"], seen["body"]


@pytest.mark.parametrize("parts", [1, 7])
def test_a_prompt_is_named_and_its_body_comes_through_whole(parts):
    (header,), body = passed_on(BODY, parts=parts)
    assert PromptPrefix.from_header(header).digests == prefix_of_body(BODY).digests
    assert body == BODY


def test_a_clients_own_header_is_dropped():
    (header,), _ = passed_on(BODY, headers=[(PREFIX_HEADER, b"1:")])
    assert header != b"1:"
    assert passed_on(b"", method="GET", path="/health", headers=[(PREFIX_HEADER, b"1:")])[0] == []


@pytest.mark.parametrize("body", [b"", b"{", b"x" * (MOST_BODY_BYTES + 1)])
def test_a_body_without_a_prompt_or_too_large_comes_through_without_a_name(body):
    assert passed_on(body, parts=3) == ([], body)


def test_a_service_below_a_prefix_is_named_too():
    for path in ("chat/completions", "responses", "messages"):
        assert passed_on(BODY, path=f"/models/v1/{path}")[0]
    assert not passed_on(BODY, path="/tokenize")[0]


def test_ray_finds_it_under_its_path():
    module, _, name = IMPORT_PATH.partition(":")
    assert module == middlewares.__module__
    assert name == middlewares.__name__
    assert middlewares()[0].cls is PrefixHeader
