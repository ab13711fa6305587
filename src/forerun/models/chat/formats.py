"""The forms in which models write tool calls and reasoning, and which model writes which."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from forerun.models.chat.call_reader import CallReader, Marks
from forerun.models.chat.events import AnswerReader
from forerun.models.chat.harmony import HARMONY
from forerun.models.chat.reasoning import THINK, ReasoningForm, ReasoningMarks
from forerun.models.chat.tool_format import Function, ToolFormat, json_format, one_of, regex, styled
from forerun.models.tokenizer import Tokenizer

LLAMA3_OTHER_TEXT = regex(r"([^{\s](.|\n)*)?")
MISTRAL_ID_LENGTH = 9  # letters and digits; its templates refuse others


class MarkedCalls(ToolFormat):
    """JSON objects of a name and arguments, between marks."""

    marks: Marks
    arguments_key = "arguments"

    def __init__(self) -> None:
        self.mark, self.opens_text = self.marks.begin, self.marks.opens_text

    def reader(self, names: frozenset[str], *, is_forced: bool) -> AnswerReader:
        """A reader of the marks and what is between them."""
        return CallReader(self.marks, names, is_forced=is_forced)

    def objects(self, functions: Sequence[Function], *, before: str = "", after: str = "") -> list[dict[str, Any]]:
        """A tag for each function's call, with texts around it."""
        return [
            {
                "type": "tag",
                "begin": f'{before}{{"name": {json.dumps(function.name)}, "{self.arguments_key}": ',
                "content": json_format(styled(function)),
                "end": f"}}{after}",
            }
            for function in functions
        ]

    def object(self, name: str, arguments: Mapping[str, Any]) -> str:
        """One call as JSON."""
        return json.dumps({"name": name, self.arguments_key: arguments}, ensure_ascii=False)


class Hermes(MarkedCalls):
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


class Llama3Json(MarkedCalls):
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
        return one_of(self.forced(functions, only_one=only_one), LLAMA3_OTHER_TEXT)

    def written(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Calls with semicolons between them."""
        return "; ".join(self.object(name, arguments) for name, arguments in calls)


class Mistral(MarkedCalls):
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


FORMATS: dict[str, ToolFormat] = {
    "hermes": Hermes(),
    "llama3_json": Llama3Json(),
    "mistral": Mistral(),
    "openai": HARMONY,
}
"""Forms of calls by vLLM's names."""

DEFAULT = "hermes"
"""For templates that say nothing of tools: what most small models have seen, if any."""

SIGNS = (
    ("<|channel|>", "openai"),
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


REASONING: dict[str, ReasoningForm] = {
    "qwen3": THINK,
    "deepseek_r1": THINK,
    "mistral": ReasoningMarks("[THINK]", "[/THINK]"),
    "openai_gptoss": HARMONY,
}
"""Forms of reasoning by vLLM's names; models of several makers write the first two, which are the same here."""

REASONING_SIGNS = (
    ("<|channel|>", "openai_gptoss"),
    ("<think>", "qwen3"),
    ("</think>", "qwen3"),
    ("[THINK]", "mistral"),
)
"""Text in a chat template -> the form in which its model writes reasoning; the first match counts."""


def reasoning_form(tokenizer: Tokenizer, name: str | None = None) -> ReasoningForm | None:
    """The form in which a model writes its reasoning, by its name, or else as its chat templates show it; None for none."""
    if name is None:
        template = tokenizer.chat_template or ""
        text = template if isinstance(template, str) else "".join(template.values())
        name = next((one for sign, one in REASONING_SIGNS if sign in text), None)
    return None if name is None else REASONING.get(name)


def _in_a_row(tags: list[dict[str, Any]], separator: str, *, only_one: bool) -> dict[str, Any]:
    """One tag or several."""
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": only_one,
    }
