"""Conversations with tools for templates that know none."""

from __future__ import annotations

from forerun.server.conversation import as_text
from forerun.server.tools.formats import FORMATS

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


def test_calls_and_results_are_told_as_text():
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
