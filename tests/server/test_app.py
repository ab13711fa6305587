"""What every answer has, and methods that answer beside GET."""

from __future__ import annotations

import pytest

from forerun.server import app
from tests.server.served import PROMPT
from tests.server.test_load import until

TEXT = {"prompt": PROMPT, "max_tokens": 1}


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/health", None, 200),
        ("POST", "/v1/completions", TEXT, 200),
        ("POST", "/v1/completions", TEXT | {"stream": True}, 200),
        ("POST", "/v1/completions", {}, 400),
        ("GET", "/nope", None, 404),
    ],
)
def test_every_answer_repeats_the_clients_id_or_has_a_new_one(plain, method, path, body, status):
    ids = []
    for headers in ({"X-Request-Id": "a1.B-2_c:d/e"}, {}, {}):
        found, answered, _ = plain.send(method, path, body, headers)
        assert found == status
        ids.append(answered["x-request-id"])
    assert ids[0] == "a1.B-2_c:d/e"
    assert len(set(ids)) == 3
    assert all(len(request_id) >= 12 for request_id in ids)


@pytest.mark.parametrize("given", ["a b", "a" * 129, "<script>", "\u00e9", ""])
def test_an_id_that_is_not_sane_is_replaced(plain, given):
    _, answered, _ = plain.send("GET", "/health", headers={"X-Request-Id": given.encode("latin-1")})
    assert answered["x-request-id"] != given
    assert answered["x-request-id"].isalnum()


def test_a_bug_is_logged_with_the_id_of_its_request(plain, monkeypatch, caplog):
    def fail(*_args):
        raise RuntimeError("secret")

    monkeypatch.setattr(plain.model, "check_name", fail)
    status, answered, _ = plain.send("POST", "/v1/completions", TEXT, {"X-Request-Id": "mine"})
    assert (status, answered["x-request-id"]) == (500, "mine")
    assert "request mine failed" in caplog.text


def test_health_answers_head(plain):
    status, _, text = plain.send("HEAD", "/health")
    assert (status, text) == (200, "")


def test_memory_that_a_large_body_took_is_given_back_at_its_end(plain, monkeypatch):
    given_back = []
    monkeypatch.setattr(app, "LARGE_BODY_BYTES", 1000)
    monkeypatch.setattr(app, "give_back_freed_memory", lambda: given_back.append("given back"))
    plain.post("/tokenize", {"prompt": "a" * 900})
    assert not given_back
    plain.post("/tokenize", {"prompt": "a" * 1000})
    until(lambda: given_back == ["given back"])
