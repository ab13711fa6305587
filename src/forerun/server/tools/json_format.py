"""What the forms that write calls as JSON objects have in common."""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from forerun.server.tools.base import Function
from forerun.server.tools.json_reader import JsonCallReader, Marks

STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space as `json.dumps` writes it, which is what models have seen; llguidance's names."""


class JsonFormat(ABC):
    """See `base.ToolFormat`: objects of a name and arguments, between marks."""

    marks: Marks
    arguments_key = "arguments"

    @property
    def mark(self) -> str:
        """What calls begin with."""
        return self.marks.begin

    @abstractmethod
    def forced(self, functions: Sequence[Function], *, only_one: bool) -> dict[str, Any]:
        """Nothing but calls, one at least."""

    @abstractmethod
    def after_text(self, functions: Sequence[Function], *, only_one: bool) -> dict[str, Any]:
        """Any text, and calls where the model begins one."""

    @abstractmethod
    def written(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Calls as the model would write them."""

    def reader(self, names: frozenset[str], *, is_forced: bool) -> JsonCallReader:
        """A reader of one text."""
        return JsonCallReader(self.marks, names, is_forced=is_forced)

    def new_id(self) -> str:
        """An id as OpenAI's look."""
        return f"call_{uuid.uuid4().hex[:24]}"

    def objects(self, functions: Sequence[Function], *, before: str = "", after: str = "") -> list[dict[str, Any]]:
        """A tag for each function's call, with texts around it."""
        return [
            {
                "type": "tag",
                "begin": f'{before}{{"name": {json.dumps(function.name)}, "{self.arguments_key}": ',
                "content": {"type": "json_schema", "json_schema": styled(function)},
                "end": f"}}{after}",
            }
            for function in functions
        ]

    def object(self, name: str, arguments: Mapping[str, Any]) -> str:
        """One call as JSON."""
        return json.dumps({"name": name, self.arguments_key: arguments}, ensure_ascii=False)


def styled(function: Function) -> dict[str, Any]:
    """A function's schema for llguidance; keywords that it does not know count only where the schema is strict."""
    return {**function.schema, "x-guidance": STYLE | {"lenient": not function.is_strict}}


def in_a_row(tags: list[dict[str, Any]], separator: str, *, only_one: bool) -> dict[str, Any]:
    """One tag or several."""
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": only_one,
    }
