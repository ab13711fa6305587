"""The forms in which models write tool calls: as a grammar, as text, and which model writes which."""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.models.tools.call_reader import CallReader, Marks

STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space as `json.dumps` writes it, which is what models have seen; llguidance's names."""

LLAMA3_OTHER_TEXT = {"type": "regex", "pattern": r"([^{\s](.|\n)*)?"}
MISTRAL_ID_LENGTH = 9  # letters and digits; its templates refuse others


@dataclass(frozen=True, slots=True)
class Function:
    """A function as a grammar needs it: its name and the JSON Schema of its arguments, an object.

    `is_strict`: a keyword of the schema that cannot be obeyed is an error, not left out.
    """

    name: str
    schema: Mapping[str, Any]
    is_strict: bool = False


class ToolFormat(ABC):
    """A form in which models write tool calls: JSON objects of a name and arguments, between marks.

    `forced` and `after_text` return formats of structural tags (see `grammar.structural_tags`).
    """

    marks: Marks
    arguments_key = "arguments"

    @property
    def mark(self) -> str:
        """What calls begin with; answers must show it where it is a special token."""
        return self.marks.begin

    @abstractmethod
    def forced(self, functions: Sequence[Function], *, only_one: bool) -> dict[str, Any]:
        """Nothing but calls, one at least."""

    @abstractmethod
    def after_text(self, functions: Sequence[Function], *, only_one: bool) -> dict[str, Any]:
        """Any text, and calls where the model begins one."""

    @abstractmethod
    def written(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Calls, (name, arguments) each, as the model would write them."""

    def reader(self, names: frozenset[str], *, is_forced: bool) -> CallReader:
        """A reader of one text; with `is_forced` a grammar completes each call that has begun, so it is reported at once."""
        return CallReader(self.marks, names, is_forced=is_forced)

    def new_id(self) -> str:
        """An id for a call, as templates of such models take it; here as OpenAI's look."""
        return f"call_{uuid.uuid4().hex[:24]}"

    def objects(self, functions: Sequence[Function], *, before: str = "", after: str = "") -> list[dict[str, Any]]:
        """A tag for each function's call, with texts around it."""
        return [
            {
                "type": "tag",
                "begin": f'{before}{{"name": {json.dumps(function.name)}, "{self.arguments_key}": ',
                "content": {"type": "json_schema", "json_schema": _styled(function)},
                "end": f"}}{after}",
            }
            for function in functions
        ]

    def object(self, name: str, arguments: Mapping[str, Any]) -> str:
        """One call as JSON."""
        return json.dumps({"name": name, self.arguments_key: arguments}, ensure_ascii=False)


class Hermes(ToolFormat):
    """Calls of Hermes, Qwen 2.5 and 3, and many small models.

    `<tool_call>`, a line with `{"name": ..., "arguments": {...}}`, `</tool_call>`; one call each.
    """

    marks = Marks(begin="<tool_call>", closing="</tool_call>")

    def forced(self, functions: Sequence[Function], *, only_one: bool) -> dict[str, Any]:
        """Calls, each on lines of its own."""
        return _in_a_row(self._tags(functions), "\n", only_one=only_one)

    def after_text(self, functions: Sequence[Function], *, only_one: bool) -> dict[str, Any]:
        """Any text, in which `<tool_call>` begins a call."""
        return {
            "type": "triggered_tags",
            "triggers": [self.mark],
            "tags": self._tags(functions),
            "stop_after_first": only_one,
        }

    def written(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Calls, each on lines of its own."""
        return "\n".join(
            f"{self.mark}\n{self.object(name, arguments)}\n{self.marks.closing}" for name, arguments in calls
        )

    def _tags(self, functions: Sequence[Function]) -> list[dict[str, Any]]:
        return self.objects(functions, before=f"{self.mark}\n", after=f"\n{self.marks.closing}")


class Llama3Json(ToolFormat):
    """Calls of Llama 3.1 and 3.2.

    `{"name": ..., "parameters": {...}}` as the whole text; its templates take one call a message. Several, with
    semicolons between them, are read all the same.
    """

    marks = Marks(begin="<|python_tag|>", separator=";", opens_text=True)
    arguments_key = "parameters"

    def forced(self, functions: Sequence[Function], *, only_one: bool) -> dict[str, Any]:  # noqa: ARG002
        """One call."""
        return _in_a_row(self.objects(functions), "; ", only_one=True)

    def after_text(self, functions: Sequence[Function], *, only_one: bool) -> dict[str, Any]:
        """One call, or a text that does not begin as one."""
        return {"type": "or", "elements": [self.forced(functions, only_one=only_one), LLAMA3_OTHER_TEXT]}

    def written(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Calls with semicolons between them."""
        return "; ".join(self.object(name, arguments) for name, arguments in calls)


class Mistral(ToolFormat):
    """Calls of Mistral's models up to tokenizer v7, `[TOOL_CALLS]` and a list of `{"name": ..., "arguments": {...}}`.

    Later ones write another form.
    """

    marks = Marks(begin="[TOOL_CALLS]", opening="[", separator=",", closing="]")

    def forced(self, functions: Sequence[Function], *, only_one: bool) -> dict[str, Any]:
        """The list."""
        return {
            "type": "tag",
            "begin": f"{self.mark} [",
            "content": _in_a_row(self.objects(functions), ", ", only_one=only_one),
            "end": "]",
        }

    def after_text(self, functions: Sequence[Function], *, only_one: bool) -> dict[str, Any]:
        """Any text, and the list at its end, if the model begins one."""
        return {
            "type": "triggered_tags",
            "triggers": [self.mark],
            "tags": [self.forced(functions, only_one=only_one)],
            "stop_after_first": True,
        }

    def written(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """The list."""
        return f"{self.mark} [{', '.join(self.object(name, arguments) for name, arguments in calls)}]"

    def new_id(self) -> str:
        """An id that Mistral's templates take."""
        return uuid.uuid4().hex[:MISTRAL_ID_LENGTH]


FORMATS: dict[str, ToolFormat] = {"hermes": Hermes(), "llama3_json": Llama3Json(), "mistral": Mistral()}

DEFAULT = "hermes"
"""For templates that say nothing of tools: what most small models have seen, if any."""

SIGNS = (
    ("<function=", None),  # Qwen3-Coder's
    ("<arg_key>", None),  # GLM's, within <tool_call>
    ("[ARGS]", None),  # Mistral's newer one
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": ', "llama3_json"),
)
"""Text in a chat template -> the form that the template teaches, or None for one that is not known here; the first match counts."""


def format_of(tool_template: str | None) -> str | None:
    """Name of the form that a model writes; None if its template teaches one that is not known.

    Args:
        tool_template: the template that reads tools, if there is one.
    """
    if tool_template is None:
        return DEFAULT
    return next((name for sign, name in SIGNS if sign in tool_template), None)


def _styled(function: Function) -> dict[str, Any]:
    """A function's schema for llguidance; keywords that it does not know count only where the schema is strict."""
    return {**function.schema, "x-guidance": STYLE | {"lenient": not function.is_strict}}


def _in_a_row(tags: list[dict[str, Any]], separator: str, *, only_one: bool) -> dict[str, Any]:
    """One tag or several."""
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": only_one,
    }
