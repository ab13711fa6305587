"""/openapi.json says what the endpoints take and give, and they keep to it."""

from __future__ import annotations

from collections import Counter

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode, checks

from tests.server.served import CHAT, NAME, PROMPT

checks.load_all_checks()
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
OPERATIONS = {
    "/health": "GET",
    "/version": "GET",
    "/metrics": "GET",
    "/v1/models": "GET",
    "/v1/models/{name}": "GET",
    "/v1/completions": "POST",
    "/v1/chat/completions": "POST",
    "/v1/responses": "POST",
    "/v1/responses/input_tokens": "POST",
    "/v1/messages": "POST",
    "/v1/messages/count_tokens": "POST",
    "/tokenize": "POST",
    "/detokenize": "POST",
    "/tokenizer_info": "GET",
}
SERVED = {
    "/v1/completions": {"model": NAME, "prompt": PROMPT, "allowed_token_ids": None},
    "/v1/chat/completions": {"model": NAME, "messages": CHAT, "allowed_token_ids": None},
    "/v1/responses": {"model": NAME, "input": "hello", "allowed_token_ids": None},
    "/v1/responses/input_tokens": {"model": NAME, "input": "hello"},
    "/v1/messages": {"model": NAME, "messages": CHAT, "system": None},
    "/v1/messages/count_tokens": {"model": NAME, "messages": CHAT},
    "/tokenize": {"model": NAME},
    "/detokenize": {"model": NAME, "tokens": [70, 71]},
}
"""What makes bodies that fit the description fit this model."""


@pytest.fixture(scope="module")
def schema(plain):
    schema = schemathesis.openapi.from_url(f"{plain.url}/openapi.json")
    schema.config.generation.update(modes=[GenerationMode.POSITIVE], allow_x00=False)
    schema.config.phases.coverage.enabled = False
    return schema


def test_every_endpoint_is_described(schema):
    assert {path: method.upper() for path in schema for method in schema[path]} == OPERATIONS


@pytest.mark.parametrize("path", OPERATIONS)
def test_what_fits_the_description_gets_a_described_answer(plain, schema, path):
    statuses = Counter()

    @settings(max_examples=25, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(schema[path][OPERATIONS[path]].as_strategy(generation_mode=GenerationMode.POSITIVE))
    def ask(case):
        if isinstance(case.body, dict):
            case.body = whole(case.body)
        for changes in ({}, SERVED.get(path, {})):
            if changes:
                case.body |= changes
            answer = case.call_and_validate(base_url=plain.url, checks=CHECKS)
            statuses[answer.status_code] += 1

    ask()
    assert statuses[200] > 0 or path == "/v1/models/{name}"
    assert set(statuses) <= {200, 400, 404}
    assert plain.send("GET", "/health")[0] == 200


@pytest.mark.parametrize("body", ["ChatBody", "CompletionBody"])
def test_what_an_answer_must_match_is_among_the_fields(plain, body):
    _, _, described = plain.send("GET", "/openapi.json")
    fields = described["components"]["schemas"][body]["properties"]
    for name, kind in {"response_format": "json_schema", "structured_outputs": "regex"}.items():
        assert kind in fields[name]["anyOf"][0]["properties"]


def test_the_counts_of_an_answer_are_those_that_are_described(plain):
    _, _, described = plain.send("GET", "/openapi.json")
    usage = plain.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1})["usage"]
    assert set(usage) == set(described["components"]["schemas"]["Usage"]["required"])


def whole(value):
    """The value with whole numbers as integers: 1.0 is one in a schema, and none for the server."""
    match value:
        case dict():
            return {name: whole(inner) for name, inner in value.items()}
        case list():
            return [whole(inner) for inner in value]
        case float() if value.is_integer():
            return int(value)
        case _:
            return value
