"""Renders conversations with a chat template: Jinja in a sandbox, with the functions that transformers offers to templates.

Templates are untrusted code: they get plain data only, and functions through which nothing else can be reached.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np
from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

ARGUMENTS = frozenset({"messages", "tools", "add_generation_prompt"})
"""The variables that every template gets."""

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names that clients use for a message's reasoning; a template reads one of the first two."""

END_MARK = "THE_MESSAGE_ENDS_HERE "  # the space reveals whether a template strips messages

Message = dict[str, Any]

Render = Callable[..., str]
"""A function with the parameters and the result of `render`."""


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool | str = False,
    variables: Mapping[str, Any],
) -> str:
    """Render a conversation.

    Args:
        template: the template's text.
        messages: dicts with "role" and "content"; entries that are None count as absent.
        tools: JSON schemas of functions.
        add_generation_prompt: whether the text ends with the beginning of an answer.
        continue_final_message: whether it ends where the last message's "content", or the field of this name, does.
        variables: other variables that the template may read, special tokens among them.

    Raises:
        TemplateError: the template is not Jinja, reaches out of its sandbox, or refuses the messages.
        ArithmeticError, AttributeError, LookupError, TypeError, ValueError: it fails on these messages.
    """
    if not messages:
        raise ValueError("there is no message; give one or more")
    chat = [_with_reasoning({k: plain(v) for k, v in message.items() if v is not None}) for message in messages]
    final = None
    if continue_final_message:
        field = continue_final_message if isinstance(continue_final_message, str) else "content"
        final = _mark_end(chat[-1], field, template)
    values = {"documents": None, **plain(variables), "messages": chat, "tools": plain(tools)}
    text = compiled(template).render(**values, add_generation_prompt=add_generation_prompt)
    return text if final is None else _cut_at_mark(text, final)


@lru_cache(maxsize=16)
def variables_of(template: str) -> frozenset[str]:
    """Return the variables that a template reads; none if it is not Jinja."""
    try:
        names = find_undeclared_variables(READER.parse(template))
    except (TemplateError, RecursionError):
        return frozenset()
    return frozenset(names - READER.globals.keys())


@lru_cache(maxsize=16)
def compiled(template: str) -> Template:
    """Compile a template."""
    return ENVIRONMENT.from_string(template)


def plain(value: Any) -> Any:
    """Copy a value as plain data. Other objects (an image, for one) become the name of their type: templates must not call them."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(plain(one) for one in value)
    return _plain_object(value)


def _plain_object(value: Any) -> Any:
    """Copy NumPy's numbers, dataclasses and pydantic's models."""
    if isinstance(value, np.generic):
        return plain(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):
        return plain(dump())
    return f"<{type(value).__name__}>"


def _with_reasoning(message: Message) -> Message:
    """Return the message with its reasoning under each name that templates read, whichever the client used."""
    found = next((message[name] for name in REASONING_FIELDS if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _mark_end(message: Message, field: str, template: str) -> str:
    """Mark the end of the text to continue, in place, and return the text."""
    content = message.get(field)
    if content is None:
        raise ValueError(f"continue_final_message: the last message has no {field!r} to go on with")
    copies = (
        [name for name in REASONING_FIELDS if message.get(name) == content] if field in REASONING_FIELDS else [field]
    )
    if not any(name in template for name in copies):
        raise ValueError(f"continue_final_message: the chat template does not read {field!r}")
    if isinstance(content, str):
        message.update(dict.fromkeys(copies, content + END_MARK))
        return content
    parts = [part for part in content if "text" in part]
    if not parts:
        raise ValueError("continue_final_message: the last message has no text to go on with")
    text: str = parts[-1]["text"]
    parts[-1]["text"] = text + END_MARK
    return text


def _cut_at_mark(text: str, final: str) -> str:
    """Return the text up to the mark, stripped if the template stripped the mark."""
    place = text.rfind(END_MARK.strip())
    if place < 0 or final.strip() not in text:
        raise ValueError("continue_final_message: the chat template leaves the last message out, or parts of it")
    return text[:place] if text.startswith(END_MARK, place) else text[:place].rstrip()


class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %} around an assistant's text, which it leaves unchanged."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's way)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """A dict type with one of its attributes only."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Jinja's namespace, without names that begin with an underscore, which could be Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        values = dict(*args[1:], **kwargs)
        for name in values:
            _refuse_underscore(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"namespace: got {name!r}; a name must not begin with an underscore")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Dump JSON as transformers does; Jinja's own filter would escape characters that are special in HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@pass_context
def _never_folded(*_args: Any) -> Any:
    """Stands for each filter: as it needs a context, Jinja does not call it while it parses."""


class _Reader(ImmutableSandboxedEnvironment):
    """Parses templates without folding constants, which may take any time and memory."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)
    intercepted_unops = frozenset(ImmutableSandboxedEnvironment.default_unop_table)


def _environment(kind: type[ImmutableSandboxedEnvironment]) -> ImmutableSandboxedEnvironment:
    extensions = [_GenerationTag, "jinja2.ext.loopcontrols"]
    environment = kind(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


ENVIRONMENT = _environment(ImmutableSandboxedEnvironment)
READER = _environment(_Reader)
READER.filters = dict.fromkeys(READER.filters, _never_folded)
