"""Calls of Mistral's models up to tokenizer v7; later ones write another form."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from forerun.server.tools.base import Function
from forerun.server.tools.json_format import JsonFormat, in_a_row
from forerun.server.tools.json_reader import Marks

ID_LENGTH = 9  # letters and digits; its templates refuse others


class Mistral(JsonFormat):
    """`[TOOL_CALLS]` and a list of `{"name": ..., "arguments": {...}}`."""

    marks = Marks(begin="[TOOL_CALLS]", opening="[", separator=",", closing="]")

    def forced(self, functions: Sequence[Function], *, only_one: bool) -> dict[str, Any]:
        """The list."""
        return {
            "type": "tag",
            "begin": f"{self.mark} [",
            "content": in_a_row(self.objects(functions), ", ", only_one=only_one),
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
        return uuid.uuid4().hex[:ID_LENGTH]
