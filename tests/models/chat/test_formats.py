"""Which form a model's chat template teaches, and ids of calls."""

from __future__ import annotations

import pytest

from forerun.models.chat.formats import FORMATS, format_of


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, "hermes"),
        ("{% if tools %}<tools>...</tools> within <tool_call></tool_call>{% endif %}", "hermes"),
        ("{% for call in calls %}[TOOL_CALLS] [...]{% endfor %}", "mistral"),
        ("""{{ '{"name": "' + call.name + '", "parameters": ' }}""", "llama3_json"),
        ("{{ '<|python_tag|>' }}", "llama3_json"),
        ("<|start|>assistant<|channel|>final<|message|>", "openai"),
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
