"""OpenAI's /v1/responses: answers whole and event by event, functions."""

from __future__ import annotations

import json

import pytest
from pydantic import BaseModel

from tests.server.response_items import FUNCTIONS, LOGPROBS, LONG, PATH, SPACE, create, given, joined, stream
from tests.server.served import CHAT, NAME, chat_ids, generate, served
from tests.server.tool_models import saying, tool_llm, tool_target

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rom", "days": 3}}\n</tool_call>'
ROME = {"city": "Rom", "days": 3}


@pytest.fixture(scope="module")
def calling():
    with served(tool_llm(tool_target())) as it:
        yield it


def without_ids(response):
    """What does not differ from one answer to the same request to the next."""
    output = [{**item, "id": 0, "call_id": 0} for item in response["output"]]
    return {**response, "output": output} | dict.fromkeys(("id", "created_at", "completed_at", "usage"))


def text_of(response):
    return "".join(part["text"] for item in response["output"] for part in item.get("content", ()))


def calls_of(response):
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


# --- answers ---------------------------------------------------------------------------------------


def test_the_answer_is_what_the_offline_engine_writes(either):
    answer = create(either)
    output = generate(chat_ids(CHAT)).outputs[0]
    assert answer["id"].startswith("resp_")
    assert text_of(answer) == output.text
    assert answer["usage"]["output_tokens"] == len(output.token_ids)
    assert answer["usage"]["total_tokens"] == len(output.token_ids) + len(chat_ids(CHAT))


@pytest.mark.parametrize(
    "fields", [{}, LOGPROBS, {"text": LONG, "max_output_tokens": 40}], ids=["text", "logprobs", "long"]
)
def test_a_stream_is_the_same_response_event_by_event(either, fields):
    streamed, whole = joined(stream(either, **fields)), create(either, **fields)
    assert without_ids(streamed) == without_ids(whole)
    assert streamed["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_what_was_drafted_is_reported_where_chats_report_it(plain, drafting):
    asked = {"model": NAME, "messages": CHAT, "max_tokens": 16, "temperature": 0}
    chat = drafting.post("/v1/chat/completions", asked)["metrics"]
    assert create(drafting)["metrics"] == joined(stream(drafting))["metrics"] == chat
    assert "metrics" not in create(plain)


def test_a_prediction_changes_no_text_and_is_counted(either):
    whole = create(either)
    predicted = create(either, prediction={"type": "content", "content": text_of(whole)})
    assert text_of(predicted) == text_of(whole)
    details = predicted["usage"]["output_tokens_details"]
    assert set(details) == {"reasoning_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens"}
    assert (details["accepted_prediction_tokens"] > 0) == either.model.speculates


def test_tokens_of_the_prefix_cache_are_counted(plain):
    fields = {"instructions": "Be kind. " * 8, "cache_salt": "another salt of its own"}
    first, second = (create(plain, **fields)["usage"] for _ in range(2))
    assert (first["input_tokens_details"]["cached_tokens"], second["input_tokens"]) == (0, first["input_tokens"])
    assert second["input_tokens_details"]["cached_tokens"] >= 64


def test_the_count_is_that_of_the_prompt_with_its_functions(calling):
    prompt = {"input": "hello", "instructions": "Be kind.", "tools": [*FUNCTIONS, SPACE]}
    count = calling.post(f"{PATH}/input_tokens", {"model": NAME} | prompt)
    assert count == {
        "object": "response.input_tokens",
        "input_tokens": create(calling, **prompt)["usage"]["input_tokens"],
    }
    assert count["input_tokens"] > calling.post(f"{PATH}/input_tokens", {"input": "hello"})["input_tokens"]


@pytest.mark.parametrize("most", [3, 10_000])
def test_an_answer_that_ends_at_its_limit_or_the_contexts_is_incomplete(plain, most):
    fields = {"text": LONG, "max_output_tokens": most}
    for answer in (create(plain, **fields), joined(stream(plain, **fields))):
        assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert answer["output"][0]["status"] == "incomplete"
        assert answer["usage"]["output_tokens"] == min(most, 256 - len(chat_ids(CHAT)))


def test_an_answer_that_ends_by_itself_is_completed(plain):
    answer = create(plain, stop=text_of(create(plain))[2:4])
    assert (answer["status"], answer["incomplete_details"], answer["output"][0]["status"]) == (
        "completed",
        None,
        "completed",
    )
    assert answer["completed_at"] >= answer["created_at"]


def test_log_probabilities_are_the_chats(plain):
    asked = {"model": NAME, "messages": CHAT, "max_tokens": 16, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    (choice,) = plain.post("/v1/chat/completions", asked)["choices"]
    (item,) = create(plain, **LOGPROBS)["output"]
    assert item["content"][0]["logprobs"] == choice["logprobs"]["content"]


def test_a_response_repeats_its_request_and_says_that_nothing_is_kept(plain):
    same = {
        "instructions": "Be kind.",
        "metadata": {"a": "b"},
        "max_output_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}, "verbosity": "low"},
        "tools": [],
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "truncation": "disabled",
        "max_tool_calls": 3,
    }
    taken = {
        "store": True,
        "service_tier": "flex",
        "client_metadata": {"a": 1},
        "include": ["reasoning.encrypted_content"],
    }
    answer = create(plain, **same, **taken, previous_response_id=None, background=False)
    assert {name: answer[name] for name in same} == same
    assert (answer["store"], answer["service_tier"], answer["tool_choice"]) == (False, "default", "auto")
    assert create(plain, temperature=None)["temperature"] == 1.0


def test_an_answer_matches_the_format_that_is_asked_for(plain):
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    wanted = {"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}}
    assert json.loads(text_of(create(plain, text=wanted, max_output_tokens=100)))["ok"] in (True, False)
    assert text_of(create(plain, text={"format": {"type": "json_object"}})).startswith("{")
    assert text_of(create(plain, text={"format": {"type": "text"}})) == text_of(create(plain))


def test_openais_client_parses_streams_and_counts(plain):
    class Verdict(BaseModel):
        ok: bool

    client = plain.client()
    asked = {"model": NAME, "input": "hello", "max_output_tokens": 100}
    assert client.responses.parse(**asked, text_format=Verdict).output_parsed.ok in (True, False)
    with client.responses.stream(**asked, text_format=Verdict) as events:
        *_, last = events
        assert events.get_final_response().output_parsed.ok in (True, False)
    assert last.type == "response.completed"
    assert client.responses.input_tokens.count(model=NAME, input="hello").input_tokens == len(chat_ids(CHAT))


# --- functions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}], ids=["any", "named"])
def test_a_call_that_must_be_is_made_and_streamed_as_it_is_written(calling, choice):
    fields = {"tools": FUNCTIONS[:1], "tool_choice": choice, "parallel_tool_calls": False, "max_output_tokens": 300}
    whole, events = create(calling, **fields), stream(calling, **fields)
    ((name, arguments),) = calls_of(whole)
    assert (name, list(arguments)) == ("get_weather", ["city", "days"])
    assert without_ids(joined(events)) == without_ids(whole)
    assert (whole["status"], whole["tool_choice"]) == ("completed", choice)
    assert sum(event["type"] == "response.function_call_arguments.delta" for event in events) > 10


@pytest.mark.parametrize(
    "way", [create, lambda *given, **fields: joined(stream(*given, **fields))], ids=["whole", "stream"]
)
@pytest.mark.parametrize(
    ("written", "kinds"),
    [
        (CALL, ["function_call"]),
        (f"First.\n{CALL}\nThen.\n{CALL}", ["message", "function_call"] * 2),
        (f"{CALL}\n{CALL}", ["function_call"] * 2),
        ("No tool is needed.", ["message"]),
        (CALL.replace("3}", "3"), ["message"]),
        ("", []),
    ],
)
def test_free_text_and_calls_are_items_in_the_order_of_the_text(calling, monkeypatch, way, written, kinds):
    with saying(monkeypatch, written):
        answer = way(calling, tools=FUNCTIONS, max_output_tokens=300)
    assert [item["type"] for item in answer["output"]] == kinds
    assert {item["status"] for item in answer["output"]} <= {"completed"}
    assert answer["status"] == "completed"
    assert calls_of(answer) == [("get_weather", ROME)] * kinds.count("function_call")
    assert len({item["call_id"] for item in answer["output"] if "call_id" in item}) == kinds.count("function_call")
    if "message" in kinds and len(kinds) > 1:
        assert text_of(answer) == "First.Then."


def test_a_call_is_done_before_the_text_that_follows_it_is_written(calling, monkeypatch):
    with saying(monkeypatch, f"{CALL}\nThis is what I do."):
        kinds = [event["type"] for event in stream(calling, tools=FUNCTIONS, max_output_tokens=300)]
    assert kinds.index("response.output_item.done") < kinds.index("response.output_text.delta")


def test_a_call_that_is_cut_is_incomplete(calling):
    fields = {"tools": FUNCTIONS[:1], "tool_choice": "required", "max_output_tokens": 50}
    for answer in (create(calling, **fields), joined(stream(calling, **fields))):
        (cut,) = answer["output"]
        assert cut["arguments"].startswith('{"city": "')
        assert (cut["status"], answer["status"]) == ("incomplete", "incomplete")


def test_a_call_into_a_namespace_has_its_own_name_and_the_namespace(calling, monkeypatch):
    with saying(monkeypatch, CALL.replace("get_weather", "sky__get_weather")):
        (made,) = create(calling, tools=[SPACE], max_output_tokens=300)["output"]
    assert (made["name"], made["namespace"]) == ("get_weather", "sky")


def test_the_output_of_an_answer_is_the_input_of_the_next(calling, monkeypatch):
    with saying(monkeypatch, f"First.\n{CALL}"):
        output = create(calling, tools=FUNCTIONS, max_output_tokens=300)["output"]
    asked = [{"role": "user", "content": "hello"}, *output, {**given(), "call_id": output[-1]["call_id"]}]
    with saying(monkeypatch, "It is sunny."):
        assert text_of(create(calling, input=asked, tools=FUNCTIONS, max_output_tokens=300)) == "It is sunny."
