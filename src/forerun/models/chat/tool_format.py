"""What a form is in which models write tool calls."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.models.chat.events import AnswerReader

STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space as `json.dumps` writes it, which is what models have seen; llguidance's names."""

ANY_TEXT = {"type": "any_text"}


@dataclass(frozen=True, slots=True)
class Function:
    """A function as a grammar needs it: its name and the JSON Schema of its arguments, an object.

    `is_strict`: a keyword of the schema that cannot be obeyed is an error, not left out.
    """

    name: str
    schema: Mapping[str, Any]
    is_strict: bool = False


class ToolFormat(ABC):
    """A form in which models write tool calls.

    `forced`, `after_text` and `answer` return formats of structural tags (see `grammar.structural_tags`).
    """

    mark: str
    """What calls begin with; answers must show it where it is a special token."""
    opens_text = False
    """Whether calls begin a text as other text may."""

    @abstractmethod
    def forced(self, functions: Sequence[Function], *, only_one: bool) -> dict[str, Any]:
        """Nothing but calls, one at least."""

    @abstractmethod
    def after_text(self, functions: Sequence[Function], *, only_one: bool) -> dict[str, Any]:
        """Any text, and calls where the model begins one."""

    @abstractmethod
    def written(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Calls, (name, arguments) each, as the model would write them."""

    @abstractmethod
    def reader(self, names: frozenset[str], *, is_forced: bool) -> AnswerReader:
        """A reader of one text; with `is_forced` a grammar completes each call that has begun, so it is reported at once."""

    def answer(self, form: dict[str, Any]) -> dict[str, Any]:
        """An answer of a given format, where there might be calls."""
        return form

    def as_its_templates_take(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A conversation in a shape from which templates of such models leave nothing out, and which they do not refuse."""
        return messages

    def new_id(self) -> str:
        """An id for a call, as templates of such models take it; here as OpenAI's look."""
        return f"call_{uuid.uuid4().hex[:24]}"


def styled(function: Function) -> dict[str, Any]:
    """A function's schema for llguidance; keywords that it does not know count only where the schema is strict."""
    return {**function.schema, "x-guidance": STYLE | {"lenient": not function.is_strict}}


def const(text: str) -> dict[str, Any]:
    """The format of one text."""
    return {"type": "const_string", "value": text}


def one_of(*forms: dict[str, Any]) -> dict[str, Any]:
    """The format of one of several."""
    return {"type": "or", "elements": [*forms]}


def row(*forms: dict[str, Any]) -> dict[str, Any]:
    """The format of several, one after the other."""
    return {"type": "sequence", "elements": [*forms]}


def json_format(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The format of JSON that matches a schema."""
    return {"type": "json_schema", "json_schema": schema}


def regex(pattern: str) -> dict[str, Any]:
    """The format of what matches a regular expression."""
    return {"type": "regex", "pattern": pattern}


def up_to(end: str, *, begin: str = "") -> dict[str, Any]:
    """The format of any text between two others."""
    return {"type": "tag", "begin": begin, "content": ANY_TEXT, "end": end}
