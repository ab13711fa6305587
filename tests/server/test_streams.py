"""The shape of streams on the wire."""

from __future__ import annotations

import json
import math

import pytest

from forerun.server.responders import event
from tests.server.served import CHAT, PROMPT

REQUESTS = {
    "/v1/completions": {"prompt": PROMPT, "temperature": 0, "max_tokens": 8, "ignore_eos": True},
    "/v1/chat/completions": {"messages": CHAT, "temperature": 0, "max_tokens": 8, "ignore_eos": True},
}


@pytest.fixture(params=REQUESTS)
def path(request):
    return request.param


def test_id_model_and_time_stay_the_same(either, path):
    events = either.stream(path, REQUESTS[path] | {"stream_options": {"include_usage": True}})
    assert len({(event["id"], event["created"], event["model"], event["object"]) for event in events}) == 1


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_without_usage_every_chunk_has_a_choice(either, path, options):
    events = either.stream(path, REQUESTS[path] | {"stream_options": options})
    assert all(len(event["choices"]) == 1 and "usage" not in event for event in events)


def test_usage_has_a_chunk_of_its_own(either, path):
    events = either.stream(path, REQUESTS[path] | {"stream_options": {"include_usage": True}})
    assert [len(event["choices"]) for event in events] == [*[1] * (len(events) - 1), 0]
    assert all(event["usage"] is None for event in events[:-1])
    whole = either.post(path, REQUESTS[path])
    counted = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert all(events[-1]["usage"][name] == whole["usage"][name] for name in counted)


def test_usage_can_be_counted_on_the_way(either, path):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = either.stream(path, REQUESTS[path] | {"stream_options": options})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-2:] == [8, 8]


def test_counts_on_the_way_are_part_of_usage(plain, path):
    events = plain.stream(path, REQUESTS[path] | {"stream_options": {"continuous_usage_stats": True}})
    assert not any("usage" in event for event in events)


def test_each_step_gives_one_chunk(drafting, path):
    events = drafting.stream(path, REQUESTS[path] | {"return_token_ids": True})
    sizes = [len(event["choices"][0]["token_ids"]) for event in events]
    assert sum(sizes) == 8
    assert max(sizes) > 1


def test_one_finish_reason_per_choice(either, path):
    events = either.stream(path, REQUESTS[path] | {"n": 2, "temperature": 1.0, "seed": 3})
    ends = [event["choices"][0]["index"] for event in events if event["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1]


def test_a_request_that_cannot_be_served_gets_a_status_and_no_stream(plain, path):
    status, _, answer = plain.send("POST", path, REQUESTS[path] | {"stream": True, "temperature": -1})
    assert status == 400
    assert answer["error"]["param"] == "temperature"


def test_an_event_is_one_line_to_every_reader():
    data = {"text": "a\x85b\u2028c\u2029d\ne"}
    line = event(data).decode().removesuffix("\n\n")
    assert len(line.splitlines()) == 1
    assert json.loads(line.removeprefix("data: ")) == data


def test_no_event_holds_a_number_that_json_has_not():
    with pytest.raises(ValueError, match="not JSON compliant"):
        event({"logprob": math.nan})
