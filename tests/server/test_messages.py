"""Anthropic's /v1/messages: what requests are made into, answers whole and event by event, tools, errors."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from forerun.server import messages
from forerun.server.app import MOST_BODY_BYTES
from forerun.server.errors import ApiError
from forerun.server.messages import chat_fields, conversation_fields
from forerun.server.messages_protocol import MessagesBody, PromptBody, WrittenMessage
from forerun.server.protocol import MOST_MESSAGES, ChatBody
from tests.server.served import CHAT, NAME, chat_ids, chat_llm, generate, served
from tests.server.test_errors import HEAVY
from tests.server.test_load import SlowSteps, assert_nothing_is_left_of, begin, until
from tests.server.tool_models import WEATHER, saying, tool_llm, tool_target

PATH = "/v1/messages"
ASKED = {"model": NAME, "messages": CHAT, "max_tokens": 16, "temperature": 0}
TOOLS = [
    {
        "name": "get_weather",
        "input_schema": WEATHER,
        "cache_control": {"type": "ephemeral"},
    },
    {"type": "custom", "name": "wait", "description": "Waits.", "input_schema": {"type": "object", "properties": {}}},
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rom", "days": 3}}\n</tool_call>'
ROME = {"city": "Rom", "days": 3}
LONG = {"format": {"type": "json_schema", "schema": {"type": "string", "minLength": 4000}}}
"""With which an answer does not end before its limit."""

WITHOUT_VARIABLES = SimpleNamespace(template_variables=frozenset())


@pytest.fixture(scope="module")
def calling():
    with served(tool_llm(tool_target())) as it:
        yield it


def create(server, **fields):
    """The message that answers, of the shape that is described."""
    answer = server.post(PATH, ASKED | fields)
    WrittenMessage.model_validate(answer, strict=True)
    return answer


def stream(server, **fields):
    """The events of a stream; each is named by its type."""
    return server.named_events(PATH, ASKED | fields)


def joined(events):
    """What a client makes of a stream that ends well: the message."""
    start, *blocks, end, stop = events
    assert (start["type"], end["type"], stop["type"]) == ("message_start", "message_delta", "message_stop")
    content, is_open = [], False
    for event in blocks:
        is_begin = event["type"] == "content_block_start"
        assert is_open != is_begin
        assert event["index"] == len(content) - (not is_begin)
        match event:
            case {"type": "content_block_start", "content_block": block}:
                assert block | {"text": "", "input": {}} == {**block, "text": "", "input": {}}
                content.append(block | ({"input": ""} if block["type"] == "tool_use" else {}))
                is_open = True
            case {"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}}:
                content[-1]["text"] += text
            case {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": text}}:
                content[-1]["input"] += text
            case {"type": "content_block_stop"}:
                is_open = False
    assert not is_open
    return {**start["message"], "content": content, **end["delta"], "usage": end["usage"]}


def refusal(server, path, body, **headers):
    """(status, error) of a request that must fail, in Anthropic's shape."""
    status, _, answer = server.send("POST", path, body, headers)
    assert set(answer) == {"type", "error", "request_id"}
    assert answer["type"] == "error"
    assert set(answer["error"]) == {"type", "message"}
    assert len(answer["error"]["message"]) < 500
    return status, answer["error"]


# --- what a request is made into -------------------------------------------------------------------


def laid_out(*turns, **fields):
    """The messages of the chat's request."""
    body = PromptBody.model_validate({"messages": list(turns), **fields})
    return conversation_fields(body, WITHOUT_VARIABLES)["messages"]


def user(*content):
    return {"role": "user", "content": [text(part) if isinstance(part, str) else part for part in content]}


def assistant(*content):
    return user(*content) | {"role": "assistant"}


def text(given):
    return {"type": "text", "text": given, "cache_control": {"type": "ephemeral"}}


def use(name="wait", **arguments):
    return {"type": "tool_use", "id": "1", "name": name, "input": arguments}


def result(**fields):
    return {"type": "tool_result", "tool_use_id": "1", **fields}


def test_calls_and_results_are_those_of_the_chat():
    turns = [
        user("How is Rome?"),
        assistant(use(city="Rome")),
        user(result(content=[text("sunny"), text("warm")]), "and?"),
    ]
    call = {"id": "1", "function": {"name": "wait", "arguments": {"city": "Rome"}}}
    assert laid_out(*turns) == [
        {"role": "user", "content": "How is Rome?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny\n\nwarm"},
        {"role": "user", "content": "and?"},
    ]


def test_the_model_reads_that_a_result_is_an_error():
    contents = [laid_out(user(result(content="none", is_error=bad)))[0]["content"] for bad in (True, False, None)]
    assert contents == ["Error: none", "none", "none"]
    assert laid_out(user(result())) == [{"role": "tool", "tool_call_id": "1", "content": ""}]


def test_blocks_and_messages_of_one_role_are_one_message():
    call = {"id": "1", "function": {"name": "wait", "arguments": {}}}
    turns = [user("a", "b"), user("c"), assistant("d", use()), assistant("e", use()), user(result()), user(result())]
    first, second, *results = laid_out(*turns)
    assert first == {"role": "user", "content": "a\n\nb\n\nc"}
    assert second == {"role": "assistant", "content": "d\n\ne", "tool_calls": [call, call]}
    assert [message["role"] for message in results] == ["tool", "tool"]


def test_earlier_thoughts_go_to_the_template():
    thought = {"type": "thinking", "thinking": "so so", "signature": "abc"}
    hidden = {"type": "redacted_thinking", "data": "abc"}
    _, message, _ = laid_out(user("a"), assistant(thought, hidden, "b"), user("c"))
    assert message == {"role": "assistant", "content": "b", "reasoning_content": "so so"}


def test_the_system_text_is_the_first_message_without_what_changes_with_each_request():
    header = "x-anthropic-billing-header: cc_version=2.1; cch=%s;"
    blocks = [[text(header % mark), text("Be kind."), text("Be brief.")] for mark in ("fa690", "00112")]
    for system in (*blocks, "Be kind.\n\nBe brief.", f"{header % 1}\nBe kind.\n\nBe brief."):
        assert laid_out(user("a"), system=system)[0] == {"role": "system", "content": "Be kind.\n\nBe brief."}
    assert laid_out(user("a"), system="")[0]["role"] == "user"
    assert laid_out(user(header))[0]["content"] == header


def test_what_the_system_says_further_on_stays_where_it_is():
    later = {"role": "system", "content": "9 tokens left"}
    turns = [user("a"), assistant(use()), user(result(content="b")), later, assistant("c"), user("d")]
    roles = [message["role"] for message in laid_out(*turns, system="Be kind.")]
    assert roles == ["system", "user", "assistant", "tool", "user", "assistant", "user"]
    assert laid_out(later, user("a"), system="Be kind.")[0]["content"] == "Be kind.\n\n9 tokens left"


@pytest.mark.parametrize(
    ("choice", "made", "is_parallel"),
    [
        (None, None, True),
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", True),
        ({"type": "tool", "name": "wait"}, {"type": "function", "function": {"name": "wait"}}, True),
    ],
)
def test_tools_and_choice_are_those_of_the_chat(choice, made, is_parallel):
    long = {"name": "a" * 128, "input_schema": {}}
    body = MessagesBody.model_validate(ASKED | {"tools": [*TOOLS, long], "tool_choice": choice})
    fields = chat_fields(body, WITHOUT_VARIABLES)
    assert (fields["tool_choice"], fields["parallel_tool_calls"]) == (made, is_parallel)
    chat = ChatBody.model_validate(fields)
    assert [tool.function.name for tool in chat.tools] == ["get_weather", "wait", "a" * 128]
    assert chat.tools[0].function.parameters == TOOLS[0]["input_schema"]
    assert not chat.tools[0].function.model_extra, "marks for a cache would be in the prompt"


@pytest.mark.parametrize(("kind", "thinks"), [("enabled", True), ("adaptive", True), ("disabled", False)])
def test_thinking_is_what_the_template_calls_it(kind, thinks):
    thinking = {"type": kind, "budget_tokens": 1024}
    body = PromptBody.model_validate({"messages": CHAT, "thinking": thinking, "output_config": {"effort": "low"}})
    model = SimpleNamespace(template_variables=frozenset({"enable_thinking", "tools"}))
    fields = conversation_fields(body, model)
    assert fields["chat_template_kwargs"] == {"enable_thinking": thinks}
    assert fields["reasoning_effort"] == "low"
    assert conversation_fields(body, WITHOUT_VARIABLES)["chat_template_kwargs"] == {}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [0] * MOST_MESSAGES},
        {"messages": [{"role": "user", "content": [0] * 100_000}]},
        {"messages": CHAT, "tools": [0] * 100},
        {"messages": CHAT, "system": [0] * 100_000},
    ],
    ids=["messages", "content", "tools", "system"],
)
def test_a_body_of_many_mistakes_is_not_told_each(body):
    with pytest.raises(ValidationError) as caught:
        PromptBody.model_validate(body)
    assert caught.value.error_count() <= 4


# --- answers ---------------------------------------------------------------------------------------


def test_the_answer_is_what_the_offline_engine_writes(either):
    answer = create(either)
    output = generate(chat_ids(CHAT)).outputs[0]
    assert answer["id"].startswith("msg_")
    assert (answer["role"], answer["model"]) == ("assistant", NAME)
    assert answer["content"] == [{"type": "text", "text": output.text}]
    assert answer["usage"]["output_tokens"] == len(output.token_ids)


def test_a_stream_is_the_same_message_event_by_event(either):
    events = stream(either)
    whole, start = create(either), events[0]["message"]
    assert joined(events) | {"id": 0, "usage": 0} == whole | {"id": 0, "usage": 0}
    assert [event["type"] for event in events[:2]] == ["message_start", "content_block_start"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"] == {
        "input_tokens": len(chat_ids(CHAT)),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 0,
    }
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_a_prediction_and_drafts_change_no_text(either):
    whole = create(either)
    predicted = create(either, prediction={"type": "content", "content": whole["content"][0]["text"]})
    assert predicted["content"] == whole["content"]
    assert create(either, forerun={"speculation": "off"})["content"] == whole["content"]


def test_tokens_of_the_prefix_cache_are_counted_apart(plain):
    system, salt = "Be kind. " * 8, "a salt of its own"
    first, second = (create(plain, system=system, cache_salt=salt)["usage"] for _ in range(2))
    (count,) = plain.post(f"{PATH}/count_tokens", {"model": NAME, "messages": CHAT, "system": system}).values()
    assert (first["cache_read_input_tokens"], first["input_tokens"]) == (0, count)
    assert second["cache_read_input_tokens"] >= 64
    assert second["input_tokens"] + second["cache_read_input_tokens"] == count
    assert joined(stream(plain, system=system, cache_salt=salt))["usage"] == second


def test_the_count_is_that_of_the_prompt_with_its_tools(calling):
    prompt = {"messages": CHAT, "system": "Be kind.", "tools": TOOLS}
    (count,) = calling.post(f"{PATH}/count_tokens", {"model": NAME} | prompt).values()
    usage = create(calling, **prompt)["usage"]
    assert count == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert count > calling.post(f"{PATH}/count_tokens", {"messages": CHAT, "system": "Be kind."})["input_tokens"]


def test_a_last_message_of_the_assistant_is_continued(plain):
    begun = [*CHAT, {"role": "assistant", "content": "I am"}]
    asked = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False}
    chat = plain.post("/v1/chat/completions", {**asked, "temperature": 0, "max_tokens": 16})
    assert create(plain, messages=begun)["content"][0]["text"] == chat["choices"][0]["message"]["content"]


def test_a_last_message_that_calls_is_not_continued(calling):
    assert create(calling, messages=[*CHAT, assistant(use())], tools=TOOLS)["content"]


@pytest.mark.parametrize(("most", "reason"), [(3, "max_tokens"), (10_000, "model_context_window_exceeded")])
def test_an_answer_ends_at_its_limit_or_where_the_context_does(plain, most, reason):
    fields = {"output_config": LONG, "max_tokens": most}
    for answer in (create(plain, **fields), joined(stream(plain, **fields))):
        assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, None)
        assert answer["usage"]["output_tokens"] == min(most, 256 - len(chat_ids(CHAT)))


def test_a_stop_sequence_ends_the_answer_and_is_named(plain):
    written = create(plain)["content"][0]["text"]
    stop = written[2:4]
    for answer in (create(plain, stop_sequences=["zzzz", stop]), joined(stream(plain, stop_sequences=["zzzz", stop]))):
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)
        assert answer["content"][0]["text"] == written[: written.index(stop)]


def test_an_answer_matches_the_format_that_is_asked_for(plain):
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    answer = create(plain, output_config={"format": {"type": "json_schema", "schema": schema}}, max_tokens=100)
    assert json.loads(answer["content"][0]["text"])["ok"] in (True, False)


# --- tools -----------------------------------------------------------------------------------------


def inputs(message):
    """Name and input of each call; a stream's input is text."""
    calls = [block for block in message["content"] if block["type"] == "tool_use"]
    return [
        (call["name"], json.loads(call["input"]) if isinstance(call["input"], str) else call["input"]) for call in calls
    ]


@pytest.mark.parametrize(
    "choice",
    [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "get_weather"}],
    ids=["any", "named"],
)
def test_a_call_that_must_be_is_made_and_ends_the_turn(calling, choice):
    fields = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 300}
    whole, events = create(calling, **fields), stream(calling, **fields)
    ((_, arguments),) = inputs(whole)
    assert whole["content"][0]["id"]
    assert isinstance(arguments, dict)
    assert inputs(joined(events)) == inputs(whole)
    assert whole["stop_reason"] == joined(events)["stop_reason"] == "tool_use"
    if choice["type"] == "tool":
        assert sum(event["type"] == "content_block_delta" for event in events) > 10, (
            "arguments come as they are written"
        )


@pytest.mark.parametrize(
    "way", [create, lambda *given, **fields: joined(stream(*given, **fields))], ids=["whole", "stream"]
)
@pytest.mark.parametrize(
    ("written", "kinds", "reason"),
    [
        (CALL, ["tool_use"], "tool_use"),
        (f"First.\n{CALL}\nThen.\n{CALL}", ["text", "tool_use", "text", "tool_use"], "tool_use"),
        ("No tool is needed.", ["text"], "end_turn"),
        (CALL.replace("3}", "3"), ["text"], "end_turn"),
        ("", [], "end_turn"),
    ],
)
def test_free_text_and_calls_are_blocks_in_the_order_of_the_text(calling, monkeypatch, way, written, kinds, reason):
    with saying(monkeypatch, written):
        answer = way(calling, tools=TOOLS, max_tokens=300)
    assert [block["type"] for block in answer["content"]] == kinds
    assert answer["stop_reason"] == reason
    assert inputs(answer) == [("get_weather", ROME)] * kinds.count("tool_use")
    if "text" in kinds and len(kinds) > 1:
        assert [block["text"] for block in answer["content"] if block["type"] == "text"] == ["First.", "Then."]


def test_a_call_that_is_cut_is_left_out_and_its_beginning_streamed(calling):
    fields = {"tools": TOOLS[:1], "tool_choice": {"type": "any"}, "max_tokens": 50}
    whole, streamed = create(calling, **fields), joined(stream(calling, **fields))
    assert (whole["content"], whole["stop_reason"]) == ([], "max_tokens")
    (call,) = streamed["content"]
    assert (call["input"], streamed["stop_reason"]) == ('{"city": "', "max_tokens")


# --- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens: "),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role: "),
        ({"messages": [user({"type": "image", "source": {}})]}, "messages.0: got a block of type 'image'; this model reads text only"),
        ({"messages": [user({"type": "document"})]}, "messages.0: got a block of type 'document'"),
        ({"messages": [user(result(content=[{"type": "image"}]))]}, "messages.0.content"),
        ({"messages": [user(use())]}, "messages.0: got a block of type 'tool_use'"),
        (
            {"messages": [user({"type": "text", "text": "a"}), {"role": "assistant", "content": [use() | {"input": "{}"}]}]},
            "messages.1.content.0.input: input should be a valid dictionary",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0: got type 'web_search_20250305'"),
        ({"tools": [{"name": "a"}]}, "tools.0.input_schema: is missing"),
        ({"tools": [{"name": "a" * 129, "input_schema": {}}]}, "tools.0.name: "),
        ({"tools": TOOLS * 2}, "tools: two have the same name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice: "),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice: 'other' is none of the tools"),
        ({"stop_sequences": [""]}, "stop_sequences: "),
        ({"temperature": -1}, "temperature: "),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"minContains": 3}}}}, "output_config.format.schema: "),
        ({"output_format": {"type": "json_schema"}}, "output_format: is not served; leave it out (use output_config.format)"),
        ({"mcp_servers": [{}]}, "mcp_servers: is not served"),
        ({"n": 2}, "n: is for /v1/chat/completions"),
        ({"response_format": {"type": "json_object"}}, "response_format: is for /v1/chat/completions"),
        ({"forerun": {"origins": True}}, "forerun.origins: is for /v1/chat/completions"),
        ({"forerun": {"speculation": "on"}}, "forerun.speculation: "),
        ({"chat_template_kwargs": {"made_up": 1}}, "chat_template_kwargs: "),
        ({"messages": [user("a" * 300)]}, "messages: the prompt is too long: 319 tokens > 255 maximum"),
        ({"messages": [user("a b " * 100_000)]}, "messages: got 400050 characters"),
        ({"messages": [user(*[result()] * (MOST_MESSAGES + 1))]}, "messages: "),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_in_anthropics_shape_and_words(plain, fields, message):
    body = {name: value for name, value in (ASKED | fields).items() if value is not None}
    status, error = refusal(plain, PATH, body)
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith(message)
    assert plain.model.admission.num_inside == 0


def test_what_only_another_service_reads_is_taken(plain):
    fields = {"metadata": {"user_id": "a"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}}
    fields |= {"context_management": {"edits": []}, "thinking": {"type": "adaptive"}}
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "some-2026-01-01"}
    status, _, answer = plain.send("POST", f"{PATH}?beta=true", ASKED | fields, headers)
    assert (status, answer.get("content")) == (200, create(plain)["content"])


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (431, "invalid_request_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_each_status_has_anthropics_name(status, kind):
    body = ApiError(status, "no", param="field", code="code").messages_body("7")
    assert body == {"type": "error", "error": {"type": kind, "message": "no"}, "request_id": "7"}


def test_errors_before_the_endpoint_have_the_shape_too(plain):
    assert refusal(plain, PATH, "{")[0] == 400
    assert refusal(plain, PATH, json.dumps(ASKED | {"system": "a" * MOST_BODY_BYTES}))[1]["type"] == "request_too_large"
    assert refusal(plain, PATH, ASKED | {"model": "claude"})[1]["type"] == "not_found_error"
    assert refusal(plain, f"{PATH}/count_tokens", {"model": "claude", "messages": CHAT})[0] == 404
    assert refusal(plain, f"{PATH}/batches", {})[0] == 404
    _, _, answer = plain.send("GET", PATH, headers={"x-request-id": "mine"})
    assert (answer["type"], answer["request_id"]) == ("error", "mine")


def test_a_bug_is_an_api_error_without_its_reason(plain, monkeypatch):
    def fail(*_arguments):
        raise RuntimeError("secret")

    monkeypatch.setattr(messages, "chat_fields", fail)
    status, error = refusal(plain, PATH, ASKED)
    assert (status, error["type"]) == (500, "api_error")
    assert "secret" not in error["message"]


def test_an_error_in_midstream_is_the_last_event(plain):
    heavy = {"output_config": {"format": {"type": "json_schema", "schema": HEAVY}}, "max_tokens": 40}
    events = stream(plain, **heavy, temperature=1, seed=1)
    assert events[0]["type"] == "message_start"
    assert set(events[-1]) == {"type", "error", "request_id"}
    assert events[-1]["error"]["type"] == "invalid_request_error"
    assert events[-1]["error"]["message"].startswith("output_config.format: the grammar takes too much work here")
    assert refusal(plain, PATH, ASKED | heavy | {"temperature": 1, "seed": 1})[1] == events[-1]["error"]


def test_what_the_servers_end_cuts_off_ends_with_an_error():
    llm = chat_llm()
    steps = SlowSteps(llm, 0.1)
    asked = ASKED | {"output_config": LONG, "max_tokens": 200}
    with served(llm, shutdown_timeout=1) as server:
        streamed, whole = (begin(server, asked | {"stream": stream}, PATH) for stream in (True, False))
        stream = streamed.getresponse()
        until(lambda: steps.num > 1)
    *_, last, rest = stream.read().decode().split("\n\n")
    answer = whole.getresponse()
    for error in (json.loads(last.removeprefix("event: error\ndata: ")), json.loads(answer.read())):
        assert (error["type"], error["error"]["type"], rest) == ("error", "overloaded_error", "")
    assert answer.status == 503
    for connection in (streamed, whole):
        connection.close()


def test_a_client_that_goes_away_leaves_nothing_behind():
    assert_nothing_is_left_of(ASKED | {"output_config": LONG, "max_tokens": 200}, PATH)
