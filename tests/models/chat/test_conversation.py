"""Conversations with tools, for templates that read them and templates that read none."""

from __future__ import annotations

import pytest

from forerun.errors import RequestError
from forerun.models.chat.conversation import as_text, lay_out
from forerun.models.chat.formats import FORMATS
from forerun.models.tokenizer import load_tokenizer
from tests.tiny_tokenizer import save_tiny_tokenizer

USER = {"role": "user", "content": "How warm is it?"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}


def test_without_tools_and_calls_nothing_changes():
    messages = [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "No."}]
    assert as_text(messages, [], FORMATS["hermes"]) == messages


def test_tools_join_the_system_message_or_make_one():
    alone, user = as_text([USER], [TOOL], FORMATS["hermes"])
    assert alone["role"] == "system"
    assert '{"type": "function", "function": {"name": "weather"' in alone["content"]
    assert '<tool_call>\n{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}\n</tool_call>' in alone["content"]
    joined, _ = as_text([{"role": "system", "content": "Be brief."}, USER], [TOOL], FORMATS["hermes"])
    assert joined["content"] == f"Be brief.\n\n{alone['content']}"
    assert user == USER


def test_calls_and_results_become_text():
    messages = [
        USER,
        {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "21", "tool_call_id": "1"},
        {"role": "tool", "content": "22", "tool_call_id": "2"},
        USER,
    ]
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    results = "<tool_response>\n21\n</tool_response>\n<tool_response>\n22\n</tool_response>"
    assert as_text(messages, [], FORMATS["hermes"]) == [
        USER,
        {"role": "assistant", "content": f"Let me see.\n{call}\n{call}"},
        {"role": "user", "content": results},
        USER,
    ]
    assert messages[1]["tool_calls"] == [CALL, CALL]


def test_earlier_calls_are_kept_where_the_template_for_conversations_without_tools_reads_none(tmp_path):
    templates = {"default": "{% for m in messages %}{{ m.content }}\n{% endfor %}", "tool_use": "{{ tools | tojson }}"}
    tokenizer = load_tokenizer(save_tiny_tokenizer(tmp_path, chat_template=templates))
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "21"}]
    asked, called, result = (message["content"] for message in as_text(messages, [], FORMATS["hermes"]))
    assert lay_out(tokenizer, messages) == f"{asked}\n{called}\n{result}\n"
    assert lay_out(tokenizer, messages, tools=[TOOL]).startswith("[{")


def test_a_template_that_reads_tools_gets_texts_in_one_piece_and_arguments_as_objects(tmp_path):
    template = (
        "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{{ (m.tool_calls or []) | tojson }}{% endfor %}"
    )
    tokenizer = load_tokenizer(save_tiny_tokenizer(tmp_path, chat_template=template))
    function = {"name": "weather", "arguments": '{"city": "Ulm"}'}
    parts = [{"type": "text", "text": "So"}, {"type": "text", "text": "on."}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "tool_calls": [{"function": function}]}]
    tool = {"function": {"name": "weather", "strict": True}}
    assert lay_out(tokenizer, messages, tools=[tool]) == (
        '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]'
        'Soon.[][{"type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}]'
    )


def test_a_template_in_harmony_gets_each_call_in_a_message_of_its_own(tmp_path):
    template = (
        "{{ tools and '' }}{% for m in messages %}<|channel|>{{ m.role }}:{{ m.thinking or m.content }}"
        "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %};{% endfor %}"
    )
    tokenizer = load_tokenizer(save_tiny_tokenizer(tmp_path, chat_template=template))
    calls = [CALL | {"id": "1"}, CALL | {"id": "2"}]
    messages = [
        {"role": "assistant", "content": "I ask.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "content": "21", "tool_call_id": "1"},
        {"role": "tool", "content": "22", "tool_call_id": "2"},
    ]
    assert lay_out(tokenizer, messages, tools=[TOOL]) == (
        "<|channel|>assistant:Hm.\n\nI ask.weather;<|channel|>tool:21;<|channel|>assistant:weather;<|channel|>tool:22;"
    )


@pytest.mark.parametrize(
    ("messages", "tools", "said"),
    [
        ([{"content": "a"}], [], "messages: .* 'role'"),
        ([{"role": "user", "content": 5}], [], "messages: got 5 as content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], [], "messages: .*reads text only"),
        ([{"role": "assistant", "tool_calls": ["wait"]}], [], "tool_calls: got 'wait'"),
        (
            [{"role": "user", "contents": "hello"}],
            [],
            "messages: got .*'contents'.* of role 'user' must have 'content'",
        ),
        ([USER, {"role": "ipython", "content": None}], [], "of role 'ipython' must have 'content', which may be empty"),
        ([{"role": "assistant", "tool_calls": 5}], [], "tool_calls: got 5; must be a list"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], [], "'f': not JSON"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": {1}}}}]}],
            [],
            "tool_calls: .*not JSON",
        ),
        ([USER], [{"name": "weather"}], "tools: got .*'function'"),
        ([USER], [{"function": {"name": "f", "parameters": {1, 2}}}], "tools: .*'f'"),
        ([USER], [{"function": {"name": "f", "parameters": {"default": {1}}}}], "tools: one is not JSON"),
    ],
)
def test_what_is_no_message_and_no_tool_is_refused_in_one_line(tmp_path, messages, tools, said):
    tokenizer = load_tokenizer(save_tiny_tokenizer(tmp_path))
    with pytest.raises(RequestError, match=said) as caught:
        lay_out(tokenizer, messages, tools=tools)
    assert "\n" not in str(caught.value)
