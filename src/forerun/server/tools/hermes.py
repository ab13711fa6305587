"""Calls of Hermes, Qwen 2.5 and 3, and many small models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forerun.server.tools.base import Function
from forerun.server.tools.json_format import JsonFormat, in_a_row
from forerun.server.tools.json_reader import Marks


class Hermes(JsonFormat):
    """`<tool_call>`, a line with `{"name": ..., "arguments": {...}}`, `</tool_call>`; one call each."""

    marks = Marks(begin="<tool_call>", closing="</tool_call>")

    def forced(self, functions: Sequence[Function], *, only_one: bool) -> dict[str, Any]:
        """Calls, each on lines of its own."""
        return in_a_row(self._tags(functions), "\n", only_one=only_one)

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
