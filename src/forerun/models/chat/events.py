"""What an answer consists of, as readers tell of it while its text grows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text that is neither reasoning nor part of a call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of a function; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the JSON text of the last call's arguments."""

    text: str


AnswerEvent = Reasoning | Content | CallBegin | Arguments


class AnswerReader(Protocol):
    """Takes one answer's text apart as it grows; no text is lost, and none raises."""

    @property
    def is_calling(self) -> bool:
        """Whether a call has begun that is not whole; after the end, that it was cut."""

    def push(self, text: str, *, finished: bool = False) -> list[AnswerEvent]:
        """Take more text; return what is certain now, at its end all that is left."""


class TextReader:
    """Reads answers that are text and nothing else."""

    is_calling = False

    def push(self, text: str, *, finished: bool = False) -> list[AnswerEvent]:  # noqa: ARG002
        """The text."""
        return [Content(text)] if text else []


def certain_length(text: str, mark: str) -> int:
    """How much of a text that grows, in which a mark is not yet, stands before it at any rate.

    What may be the mark's beginning does not, nor white space before that.
    """
    begun = next((count for count in range(len(mark) - 1, 0, -1) if text.endswith(mark[:count])), 0)
    return len(text[: len(text) - begun].rstrip())
