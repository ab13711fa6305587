"""Conversations as prompts: laid out by the model's chat template, tools described in text where it reads none.

Templates without tools drop what they do not read; so earlier calls would be lost in silence.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from forerun.server.errors import ApiError
from forerun.server.protocol import ConversationBody
from forerun.server.served_model import ServedModel
from forerun.server.tools.formats import ToolFormat
from forerun.server.tools.tool_use import offered

Message = dict[str, Any]

INTRODUCTION = """You may call functions. They are described within <tools></tools>, one a line, by JSON Schema:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments in this form:
{example}
The results come back within <tool_response></tool_response>."""


def check_template_variables(body: ConversationBody, model: ServedModel) -> None:
    """Raise `ApiError` unless the model's template reads every variable that is given."""
    for name in body.chat_template_kwargs or {}:
        if name not in model.template_variables:
            known = ", ".join(sorted(model.template_variables)) or "none"
            raise ApiError(
                400,
                f"chat_template_kwargs: the template has no variable {name!r:.80}; it has: {known}",
                param="chat_template_kwargs",
            )


def lay_out(body: ConversationBody, model: ServedModel) -> list[int]:
    """Token ids of the conversation; its tools go to the template, or into texts where that reads none.

    Raises:
        ApiError: 400, tools and choice do not fit.
    """
    messages = [message.for_template() for message in body.messages]
    tools = [tool.for_template() for tool in offered(body)]
    if model.tool_template is None and model.tool_format is not None:
        messages, tools = as_text(messages, tools, model.tool_format), []
    return model.llm.get_tokenizer().apply_chat_template(
        messages,
        tools=tools or None,
        add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
        continue_final_message=bool(body.continue_final_message),
        render=model.templates.render,
        **(body.chat_template_kwargs or {}),
    )


def as_text(messages: Sequence[Message], tools: Sequence[Message], form: ToolFormat) -> list[Message]:
    """The conversation with its tools, calls and results as texts of system, assistant and user."""
    laid_out: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if laid_out and laid_out[-1].get("is_result"):
                laid_out[-1]["content"] += f"\n{result}"
            else:
                laid_out.append({"role": "user", "content": result, "is_result": True})
        else:
            laid_out.append(_with_calls(message, form))
    for message in laid_out:
        message.pop("is_result", None)
    return _introduced(laid_out, tools, form) if tools else laid_out


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
