"""What requests of /v1/responses are made into: those of chat completions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from forerun.server.protocol import ChatBody
from forerun.server.responses import chat_fields, conversation_fields
from forerun.server.responses_protocol import MOST_ITEMS, PromptBody, ResponsesBody
from tests.server.response_items import ASKED, FUNCTIONS, SPACE, call, given, said

WITHOUT_VARIABLES = SimpleNamespace(template_variables=frozenset())


def laid_out(*items, **fields):
    """The messages of the chat's request."""
    body = PromptBody.model_validate({"input": list(items), **fields})
    return conversation_fields(body, WITHOUT_VARIABLES)["messages"]


def chat_call(name="wait", **arguments):
    return {"id": "1", "function": {"name": name, "arguments": arguments}}


def test_a_text_is_a_message_of_the_user_and_so_is_an_item_without_type():
    message = [{"role": "user", "content": "hello"}]
    assert laid_out({"role": "user", "content": "hello"}) == laid_out(said("user", "hello")) == message
    assert conversation_fields(PromptBody(input="hello"), WITHOUT_VARIABLES)["messages"] == message


def test_calls_and_outputs_are_those_of_the_chat():
    items = [
        said("user", "How is Rome?"),
        said("assistant", "I will see."),
        call("look", arguments='{"city": "Rome"}'),
        call(),
        given(),
        given([{"type": "input_text", "text": "warm"}]),
    ]
    assert laid_out(*items) == [
        {"role": "user", "content": "How is Rome?"},
        {"role": "assistant", "content": "I will see.", "tool_calls": [chat_call("look", city="Rome"), chat_call()]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "1", "content": "warm"},
    ]


def test_earlier_thoughts_go_to_the_template():
    thought = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [{"type": "summary_text", "text": "so"}],
        "encrypted_content": "x",
    }
    whole = thought | {"content": [{"type": "reasoning_text", "text": "so so"}]}
    for item, text in ((thought, "so"), (whole, "so so")):
        message = {"role": "assistant", "content": "b", "reasoning_content": text}
        assert laid_out(said("user", "a"), item, said("assistant", "b"))[1] == message


def test_a_refusal_is_what_the_model_said():
    item = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    assert laid_out(item) == [{"role": "assistant", "content": "no"}]


def test_instructions_and_what_developers_say_first_are_the_system_message_and_later_the_users():
    items = [said("developer", "Be brief."), said("user", "a"), said("developer", "9 tokens left"), said("user", "b")]
    assert laid_out(*items, instructions="Be kind.") == [
        {"role": "system", "content": "Be kind.\n\nBe brief."},
        {"role": "user", "content": "a\n\n9 tokens left\n\nb"},
    ]


@pytest.mark.parametrize(
    ("choice", "made"),
    [
        *((None, None), ("auto", "auto"), ("none", "none"), ("required", "required")),
        ({"type": "function", "name": "wait"}, {"type": "function", "function": {"name": "wait"}}),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "wait"}]},
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "wait"}}]},
            },
        ),
    ],
)
def test_functions_and_choice_are_those_of_the_chat(choice, made):
    body = ResponsesBody.model_validate(
        ASKED | {"tools": FUNCTIONS, "tool_choice": choice, "parallel_tool_calls": False}
    )
    fields = chat_fields(body, WITHOUT_VARIABLES)
    assert (fields["tool_choice"], fields["parallel_tool_calls"]) == (made, False)
    tool = ChatBody.model_validate(fields).tools[0].function
    assert (tool.name, tool.description, tool.parameters) == tuple(
        FUNCTIONS[0][name] for name in ("name", "description", "parameters")
    )
    assert tool.strict is None, "a function is strict where the request says so"


@pytest.mark.parametrize("tools", [[], [SPACE | {"tools": []}]])
@pytest.mark.parametrize(("choice", "made"), [("auto", None), ("required", "required")])
def test_auto_without_functions_asks_for_nothing(choice, made, tools):
    body = PromptBody.model_validate({"input": "a", "tools": tools, "tool_choice": choice})
    assert conversation_fields(body, WITHOUT_VARIABLES)["tool_choice"] == made


def test_functions_of_a_namespace_have_its_name_before_theirs():
    body = PromptBody.model_validate(
        {"input": [said("user", "a"), call("get_weather", namespace="sky")], "tools": [SPACE, FUNCTIONS[0]]}
    )
    fields = conversation_fields(body, WITHOUT_VARIABLES)
    assert [tool["function"]["name"] for tool in fields["tools"]] == ["sky__get_weather", "get_weather"]
    assert fields["messages"][1]["tool_calls"] == [chat_call("sky__get_weather")]


@pytest.mark.parametrize("kind", ["named", "allowed"])
def test_a_choice_names_the_namespace_of_a_function(kind):
    chosen = {"type": "function", "name": "get_weather", "namespace": "sky"}
    choice = chosen if kind == "named" else {"type": "allowed_tools", "mode": "required", "tools": [chosen]}
    body = PromptBody.model_validate({"input": "a", "tools": [SPACE, FUNCTIONS[0]], "tool_choice": choice})
    assert "sky__get_weather" in str(conversation_fields(body, WITHOUT_VARIABLES)["tool_choice"])


def test_thoughts_that_nobody_here_can_read_are_no_turn():
    encrypted = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    assert laid_out(said("user", "a"), encrypted, said("user", "b")) == [{"role": "user", "content": "a\n\nb"}]


def test_effort_is_the_chats_and_none_turns_thinking_off_where_the_template_can():
    model = SimpleNamespace(template_variables=frozenset({"enable_thinking", "tools"}))

    def fields(effort, model):
        return conversation_fields(PromptBody(input="a", reasoning={"effort": effort, "summary": "auto"}), model)

    assert (fields("low", model)["reasoning_effort"], fields("low", model)["chat_template_kwargs"]) == ("low", {})
    off = fields("none", model)
    assert (off["reasoning_effort"], off["chat_template_kwargs"]) == (None, {"enable_thinking": False})
    assert fields("none", WITHOUT_VARIABLES)["reasoning_effort"] == "none"


def test_every_field_that_says_how_a_chat_is_sampled_is_taken():
    sampling = {"top_k": 5, "min_p": 0.1, "seed": 3, "stop": ["a"], "logit_bias": {"70": 1.0}, "cache_salt": "s"}
    sampling |= {"prediction": {"type": "content", "content": "b"}, "forerun": {"speculation": "off"}}
    chat = ChatBody.model_validate(chat_fields(ResponsesBody.model_validate(ASKED | sampling), WITHOUT_VARIABLES))
    assert chat.model_dump(include=set(sampling), exclude_none=True, exclude={"forerun": {"origins"}}) == sampling
    assert chat.max_completion_tokens == 16


@pytest.mark.parametrize(
    "body",
    [
        {"input": [0] * MOST_ITEMS},
        {"input": [{"role": "user", "content": [0] * 100_000}]},
        {"input": "a", "tools": [0] * 100},
        {"input": "a", "metadata": dict.fromkeys(map(str, range(100_000)), 0)},
        {"input": "a", "include": [0] * 64},
    ],
    ids=["input", "content", "tools", "metadata", "include"],
)
def test_a_body_of_many_mistakes_is_not_told_each(body):
    with pytest.raises(ValidationError) as caught:
        ResponsesBody.model_validate(body)
    assert caught.value.error_count() <= 4
