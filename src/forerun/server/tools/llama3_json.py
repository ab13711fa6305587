"""Calls of Llama 3.1 and 3.2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forerun.server.tools.base import Function
from forerun.server.tools.json_format import JsonFormat, in_a_row
from forerun.server.tools.json_reader import Marks

OTHER_TEXT = {"type": "regex", "pattern": r"([^{\s](.|\n)*)?"}


class Llama3Json(JsonFormat):
    """`{"name": ..., "parameters": {...}}` as the whole text; its templates take one call a message.

    Several, with semicolons between them, are read all the same.
    """

    marks = Marks(begin="<|python_tag|>", separator=";", opens_text=True)
    arguments_key = "parameters"

    def forced(self, functions: Sequence[Function], *, only_one: bool) -> dict[str, Any]:  # noqa: ARG002
        """One call."""
        return in_a_row(self.objects(functions), "; ", only_one=True)

    def after_text(self, functions: Sequence[Function], *, only_one: bool) -> dict[str, Any]:
        """One call, or a text that does not begin as one."""
        return {"type": "or", "elements": [self.forced(functions, only_one=only_one), OTHER_TEXT]}

    def written(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Calls with semicolons between them."""
        return "; ".join(self.object(name, arguments) for name, arguments in calls)
