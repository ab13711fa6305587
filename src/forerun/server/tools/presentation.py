"""Tools for templates that read none: told in the system message, calls and results as plain text.

Templates without tools drop what they do not read; so earlier calls would be lost in silence.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from forerun.server.tools.base import ToolFormat

Message = dict[str, Any]

INTRODUCTION = """You may call functions. They are described within <tools></tools>, one a line, by JSON Schema:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments in this form:
{example}
The results come back within <tool_response></tool_response>."""


def as_text(messages: Sequence[Message], tools: Sequence[Message], form: ToolFormat) -> list[Message]:
    """The conversation with its tools, calls and results as texts of system, assistant and user."""
    told: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if told and told[-1].get("is_result"):
                told[-1]["content"] += f"\n{result}"
            else:
                told.append({"role": "user", "content": result, "is_result": True})
        else:
            told.append(_with_calls(message, form))
    for message in told:
        message.pop("is_result", None)
    return _introduced(told, tools, form) if tools else told


def _with_calls(message: Message, form: ToolFormat) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = form.written([(call["function"]["name"], call["function"]["arguments"]) for call in calls])
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return others | {"content": "\n".join(filter(None, (message["content"], written)))}


def _introduced(messages: list[Message], tools: Sequence[Message], form: ToolFormat) -> list[Message]:
    """The tools at the end of the system message; without one, one of them alone."""
    described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = INTRODUCTION.format(tools=described, example=form.written([("NAME", {"ARGUMENT": "VALUE"})]))
    if messages and messages[0]["role"] == "system":
        first, *rest = messages
        return [first | {"content": "\n\n".join(filter(None, (first["content"], text)))}, *rest]
    return [{"role": "system", "content": text}, *messages]
