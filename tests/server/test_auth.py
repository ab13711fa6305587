"""Keys: every route asks for one, however its path is written."""

from __future__ import annotations

import pytest
from fastapi.routing import APIRoute

from forerun.server.auth import Keys
from tests.server.served import PROMPT, chat_llm, served

OPEN = {"/health", "/metrics", "/"}


@pytest.fixture(scope="module")
def locked():
    with served(chat_llm(), api_key=("first", "second"), enable_tokenizer_info_endpoint=True) as server:
        yield server


def routes(router):
    """All routes of an app, those of included routers too."""
    for route in router.routes:
        inner = getattr(route, "original_router", None)
        yield from routes(inner) if inner is not None else [route]


def test_every_route_asks_for_a_key(locked):
    found = list(routes(locked.server.app))
    assert len(found) >= 11
    for route in found:
        assert isinstance(route, APIRoute)
        for method in route.methods:
            path = route.path.replace("{name:path}", "tiny")
            body = {} if method == "POST" else None
            status, headers, answer = locked.send(method, path, body)
            if route.path in OPEN:
                assert status == 200
            else:
                assert status == 401, path
                assert answer["error"]["type"] == "authentication_error"
                assert answer["error"]["code"] == "invalid_api_key"
                assert headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("key", ["first", "second"])
def test_each_key_opens(locked, key):
    answer = locked.client(api_key=key).completions.create(model="tiny", prompt=PROMPT, max_tokens=1)
    assert answer.choices


@pytest.mark.parametrize(
    "header",
    ["", "first", "Bearer", "Bearer ", "Bearer fir", "Bearer first2", "Basic first", "Bearer FIRST", "Bearer \xff"],
)
def test_anything_else_does_not(locked, header):
    assert locked.send("GET", "/v1/models", headers={"Authorization": header})[0] == 401


@pytest.mark.parametrize("path", ["//v1/models", "/v1/models/../models", "/health/../v1/models", "/%761/models"])
@pytest.mark.parametrize("host", ["x/health?", "x/metrics#", "127.0.0.1"])
def test_no_spelling_of_path_or_host_gets_around_it(locked, path, host):
    status, _, answer = locked.send("GET", path, headers={"Host": host})
    assert status in (400, 401, 404)
    assert "tiny" not in str(answer)


def test_keys_are_kept_as_hashes():
    keys = Keys(["secret"])
    assert keys.accepts("secret")
    assert not keys.accepts("")
    assert "secret" not in repr(vars(keys))


def test_without_keys_everybody_is_served(plain):
    assert plain.send("GET", "/v1/models", headers={"Authorization": "Bearer whatever"})[0] == 200
