"""Keys: every route asks for one, however its path is written."""

from __future__ import annotations

import json
import socket

import pytest
from fastapi.routing import APIRoute

from forerun.server.auth import Keys, is_own_name
from forerun.server.errors import ApiError
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
                assert answer["error"].get("code") == (None if "messages" in path else "invalid_api_key")
                assert headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("key", ["first", "second"])
def test_each_key_opens(locked, key):
    answer = locked.client(api_key=key).completions.create(model="tiny", prompt=PROMPT, max_tokens=1)
    assert answer.choices
    assert locked.send("GET", "/v1/models", headers={"X-Api-Key": key, "Authorization": "Bearer other"})[0] == 200


@pytest.mark.parametrize(
    "header",
    ["", "first", "Bearer", "Bearer ", "Bearer fir", "Bearer first2", "Basic first", "Bearer FIRST", "Bearer \xff"],
)
def test_anything_else_does_not(locked, header):
    assert locked.send("GET", "/v1/models", headers={"Authorization": header})[0] == 401
    other = {"X-Api-Key": header} if header != "first" else {"Api-Key": header}
    assert locked.send("GET", "/v1/models", headers=other)[0] == 401


@pytest.mark.parametrize("path", ["//v1/models", "/v1/models/../models", "/health/../v1/models", "/%761/models"])
@pytest.mark.parametrize("host", ["x/health?", "x/metrics#", "127.0.0.1"])
def test_no_spelling_of_path_or_host_gets_around_it(locked, path, host):
    status, _, answer = locked.send("GET", path, headers={"Host": host})
    assert status in (400, 401, 404)
    assert "tiny" not in str(answer)


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE", "post", "FOO"])
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/models", "/metrics/../v1/models", "/%76%31/models", "/v1/models/"]
)
def test_no_method_gets_around_it(locked, method, path):
    status, _, answer = locked.send(method, path)
    assert status in (401, 404, 405)
    assert "tiny" not in str(answer)


@pytest.mark.parametrize("body", ["{", "", "[" * 10_000, b"\xff", json.dumps({"prompt": 5})])
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"]
)
def test_the_key_comes_before_the_body(locked, path, body):
    assert locked.send("POST", path, body)[0] == 401
    assert locked.send("POST", path, body, {"Authorization": "Bearer first"})[0] == 400


@pytest.mark.parametrize(
    "length", ["Content-Length: 3000000", "Content-Length: 99999999999", "Transfer-Encoding: chunked"]
)
def test_a_body_without_a_key_is_not_waited_for(locked, length):
    with socket.create_connection(("127.0.0.1", locked.server.port), timeout=10) as sock:
        sock.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n".encode())
        assert sock.recv(100).startswith(b"HTTP/1.1 401")


def test_keys_are_kept_as_hashes():
    keys = Keys(["secret"])
    assert keys.accepts("secret")
    assert not keys.accepts("")
    assert "secret" not in repr(vars(keys))


def test_without_keys_everybody_is_served(plain):
    assert plain.send("GET", "/v1/models", headers={"Authorization": "Bearer whatever"})[0] == 200


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("localhost:8000", True),
        ("LOCALHOST", True),
        ("127.0.0.1:8000", True),
        ("192.168.1.5", True),
        ("[::1]:8000", True),
        ("model.localhost:8000", True),
        ("host.docker.internal:8000", True),
        ("", True),
        ("evil.example:8000", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example", False),
        ("evillocalhost", False),
        ("[::1", False),
    ],
)
def test_a_name_is_the_servers_own_where_no_site_can_have_it(host, is_own):
    assert is_own_name(host) == is_own


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/tokenize")]
)
def test_without_keys_a_loopback_server_answers_no_page_of_elsewhere(plain, method, path):  # DNS rebinding
    status, _, answer = plain.send(method, path, "{", {"Host": "evil.example:8000"})
    assert status == 403
    assert "--api-key" in answer["error"]["message"]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_has_several_names(host):
    with pytest.raises(ApiError, match="without keys"):
        Keys([], host=host).check({"type": "http", "headers": [(b"host", b"evil.example")]})


def test_with_keys_or_beyond_loopback_any_name_does(locked):
    headers = {"Host": "models.example", "Authorization": "Bearer first"}
    assert locked.send("GET", "/v1/models", headers=headers)[0] == 200
    for host in ("0.0.0.0", "192.168.1.5", None):
        Keys([], host=host).check({"type": "http", "headers": [(b"host", b"models.example")]})


def test_what_is_open_to_all_is_so_under_any_name(plain):
    for path in OPEN:
        assert plain.send("GET", path, headers={"Host": "models.example"})[0] == 200
