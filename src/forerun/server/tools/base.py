"""What every form of writing tool calls gives: a grammar, a reader, and calls as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text that is no part of a call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of a function; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the JSON text of the last call's arguments."""

    text: str


Event = Content | CallBegin | Arguments


class CallReader(Protocol):
    """Finds calls in a text as it grows.

    A call counts when it is whole and names a known function; what only looks like one is content.
    White space around calls belongs to them; no other text is lost, and none raises.
    """

    is_calling: bool
    """Whether a call has begun that is not whole yet; after the end of the text: was cut."""

    def push(self, text: str, *, finished: bool = False) -> list[Event]:
        """Take more text; return what is certain now, at the end of the text all that is left."""
        ...


@dataclass(frozen=True, slots=True)
class Function:
    """A function as a grammar needs it: its name and the JSON Schema of its arguments, an object.

    `is_strict`: a keyword of the schema that cannot be obeyed is an error, not left out.
    """

    name: str
    schema: Mapping[str, Any]
    is_strict: bool = False


class ToolFormat(Protocol):
    """A form in which models write tool calls.

    `forced` and `after_text` are formats of structural tags (see `grammar.structural_tags`).
    """

    @property
    def mark(self) -> str:
        """What calls begin with, which must be shown where it is a special token."""
        ...

    def forced(self, functions: Sequence[Function], *, only_one: bool) -> dict[str, Any]:
        """Nothing but calls, one at least."""
        ...

    def after_text(self, functions: Sequence[Function], *, only_one: bool) -> dict[str, Any]:
        """Any text, and calls where the model begins one."""
        ...

    def reader(self, names: frozenset[str], *, is_forced: bool) -> CallReader:
        """A reader; `is_forced`: a grammar makes each call that has begun go on as one, so that it is told at once."""
        ...

    def written(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Calls, (name, arguments) each, as the model would write them."""
        ...

    def new_id(self) -> str:
        """An id for a call, as templates of such models take it."""
        ...
