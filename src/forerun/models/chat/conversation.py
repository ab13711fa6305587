"""Conversations as chat templates expect them, with their tools: the one way, for `LLM.chat` and for the server."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from forerun.errors import RequestError, one_line
from forerun.models.chat.call_reader import MOST_TOOL_DEPTH
from forerun.models.chat.formats import DEFAULT, FORMATS, format_of
from forerun.models.chat.tool_format import ToolFormat
from forerun.models.tokenizer import Tokenizer

Message = dict[str, Any]

WRITING_ROLE = "assistant"
"""The role of what the model writes: alone its messages may lack content, as those that only call tools do."""

TOOLS_INTRODUCTION = """You may call functions. They are described within <tools></tools>, one a line, by JSON Schema:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments in this form:
{example}
The results come back within <tool_response></tool_response>."""


ATTRIBUTION = re.compile(r"\Ax-anthropic-billing-header:.*\n?")
"""With which Claude Code begins its system text: it changes with each request, and would keep all of it from the prefix cache."""


def lay_out(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    form: ToolFormat | None = None,
    chat_template: str | None = None,
    variables: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> str:
    """The text of a conversation; its tools go to the template, or into texts where that reads none.

    Args:
        tokenizer: has the chat template.
        messages: as OpenAI has them.
        tools: likewise.
        form: how calls are written where the template reads no tools; None for the usual one.
        chat_template: in place of the model's.
        variables: of the template.
        arguments: more of `Tokenizer.render_chat`.

    Raises:
        RequestError: a message or a tool is none, or the template refuses them.
    """
    laid_out, described = [_message(message) for message in messages], [_tool(tool) for tool in tools]
    template = tokenizer.find_tool_template(chat_template, has_tools=bool(described))
    taught = FORMATS.get(format_of(template) or "")
    if template is None:
        laid_out, described = as_text(laid_out, described, form or FORMATS[DEFAULT]), []
    elif taught is not None:
        laid_out = taught.as_its_templates_take(laid_out)
    return tokenizer.render_chat(
        laid_out, tools=described or None, chat_template=chat_template, **arguments, **(variables or {})
    )


def called_arguments(given: Any) -> dict[str, Any]:
    """A call's arguments as the object that they are; they come as JSON text, as an object, or not at all.

    Raises:
        ValueError: they are something else.
    """
    if given is None or given == "":
        return {}
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON ({error}); must be the text of a JSON object") from None
    if not isinstance(given, dict):
        raise ValueError("must be the text of a JSON object")
    return not_too_deep(given)


def not_too_deep(value: dict[str, Any]) -> dict[str, Any]:
    """The value.

    Raises:
        ValueError: it has too many levels of brackets.
    """
    level: list[Any] = [value]
    for _ in range(MOST_TOOL_DEPTH):
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
        level = [inner for inner in level if isinstance(inner, (dict, list))]
        if not level:
            return value
    raise ValueError(f"nested too deeply; must be at most {MOST_TOOL_DEPTH} levels")


def _message(given: Mapping[str, Any]) -> Message:
    """The message with its text in one piece and its calls' arguments as objects; what is None is left out."""
    if not isinstance(given.get("role"), str):
        raise RequestError(f"messages: got {dict(given)!r:.80}; each must have a 'role', a text")
    if given.get("content") is None and given["role"] != WRITING_ROLE:
        raise RequestError(
            f"messages: got {dict(given)!r:.80}; each of role {given['role']!r:.20} must have 'content', which may be empty"
        )
    made = given.get("tool_calls") or []
    if not isinstance(made, (list, tuple)):
        raise RequestError(f"tool_calls: got {made!r:.80}; must be a list of calls")
    calls = {"tool_calls": [_call(call) for call in made]} if made else {}
    own = ("role", "content", "tool_calls")
    more = {name: value for name, value in given.items() if name not in own and value is not None}
    return {"role": given["role"], "content": _text(given.get("content")), **calls, **more}


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, (list, tuple)):
        raise RequestError(f"messages: got {content!r:.80} as content; must be a text or a list of parts of type text")
    for part in content:
        if not (isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise RequestError(
                f"messages: got {part!r:.80} as a part of content; this model reads text only: "
                "must be {'type': 'text', 'text': '...'}"
            )
    return "".join(part["text"] for part in content)


def _call(given: Any) -> Message:
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(
            f"tool_calls: got {given!r:.80}; each must be {{'type': 'function', 'function': {{'name': ..., 'arguments': ...}}}}"
        )
    try:
        arguments = called_arguments(function.get("arguments"))
    except ValueError as error:
        raise RequestError(f"tool_calls: arguments of {function['name']!r:.80}: {error}") from error
    known = {} if given.get("id") is None else {"id": given["id"]}
    return {**known, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tool(given: Any) -> Message:
    """The tool with its parameters always there; whether it is strict is not for the model to read."""
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(
            f"tools: got {given!r:.80}; each must be {{'type': 'function', 'function': {{'name': ..., 'parameters': ...}}}}"
        )
    description, parameters = function.get("description"), function.get("parameters")
    described = {} if description is None else {"description": description}
    schema = {"type": "object", "properties": {}} if parameters is None else parameters
    if not isinstance(schema, dict):
        raise RequestError(f"tools: parameters of {function['name']!r:.80}: got {schema!r:.80}; must be a JSON Schema")
    own = ("name", "description", "parameters", "strict")
    more = {name: value for name, value in function.items() if name not in own}
    return {"type": "function", "function": {"name": function["name"], **described, "parameters": schema, **more}}


def as_text(messages: Sequence[Message], tools: Sequence[Message], form: ToolFormat) -> list[Message]:
    """The conversation with its tools, calls and results as texts of system, assistant and user.

    For chat templates that read no tools: they drop what they do not read, and earlier calls would be lost in silence.
    """
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
    try:
        written = form.written([(call["function"]["name"], call["function"]["arguments"]) for call in calls])
    except (TypeError, ValueError) as error:
        raise RequestError(
            f"tool_calls: arguments of one are not JSON ({one_line(error)}); must be a JSON object"
        ) from error
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return others | {"content": "\n".join(filter(None, (message["content"], written)))}


def _introduced(messages: list[Message], tools: Sequence[Message], form: ToolFormat) -> list[Message]:
    """The conversation with its tools described at the end of the system message, which is added where there is none."""
    try:
        described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    except (RecursionError, TypeError, ValueError) as error:
        raise RequestError(f"tools: one is not JSON ({one_line(error)}); must be a JSON object") from error
    text = TOOLS_INTRODUCTION.format(tools=described, example=form.written([("NAME", {"ARGUMENT": "VALUE"})]))
    if messages and messages[0]["role"] == "system":
        first, *rest = messages
        return [first | {"content": "\n\n".join(filter(None, (first["content"], text)))}, *rest]
    return [{"role": "system", "content": text}, *messages]
