"""Which form a model's chat template teaches, and conversations with tools for templates that know none."""

from __future__ import annotations

import pytest

from forerun.server.tools.formats import FORMATS, as_text, format_of

USER = {"role": "user", "content": "How warm is it?"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, "hermes"),
        ("{% if tools %}<tools>...</tools> within <tool_call></tool_call>{% endif %}", "hermes"),
        ("{% for call in calls %}[TOOL_CALLS] [...]{% endfor %}", "mistral"),
        ("""{{ '{"name": "' + call.name + '", "parameters": ' }}""", "llama3_json"),
        ("{{ '<|python_tag|>' }}", "llama3_json"),
        ("<tool_call>\n<function=name>", None),
        ("<tool_call>name\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", None),
        ("[TOOL_CALLS]name[ARGS]{}", None),
        ("<|tool_calls_section_begin|>", None),
    ],
)
def test_a_template_shows_its_form(template, name):
    assert format_of(template) == name


def test_ids_are_what_templates_take():
    assert FORMATS["hermes"].new_id().startswith("call_")
    ids = {FORMATS["mistral"].new_id() for _ in range(50)}
    assert len(ids) == 50
    assert all(len(new) == 9 and new.isalnum() for new in ids)


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
