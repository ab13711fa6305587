"""Reasoning, which models write between marks before they answer: which marks, where an answer begins, and its reader."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

from forerun.models.chat.events import AnswerEvent, AnswerReader, Reasoning, certain_length
from forerun.models.chat.tool_format import const, one_of, up_to
from forerun.models.tokenizer import Tokenizer

SPACES = ("\n\n", "\n", "")
"""What models write between reasoning and answer."""


class Place(Enum):
    """Where in an answer its text begins, as its prompt may have begun it."""

    START = auto()
    """At its start: reasoning may follow, or not."""
    OPENED = auto()
    """Right behind the mark that opens reasoning."""
    INSIDE = auto()
    """In the middle of reasoning."""
    CLOSED = auto()
    """Right behind the mark that closes reasoning."""
    BEHIND = auto()
    """In the middle of what is no reasoning."""

    @property
    def is_reasoning(self) -> bool:
        """Whether what follows is reasoning."""
        return self in (Place.OPENED, Place.INSIDE)


class ReasonedReader(AnswerReader, Protocol):
    """A reader that takes reasoning apart, too."""

    has_reasoned: bool
    """Whether there is reasoning, which may be empty."""

    @property
    def is_reasoning(self) -> bool:
        """Whether reasoning has begun and not ended; after the end, that it was cut."""


class ReasoningForm(ABC):
    """A form in which models write reasoning.

    `before` and `frame` return formats of structural tags (see `grammar.structural_tags`).
    """

    marks: tuple[str, ...]
    """What answers must show where it is a special token."""

    @abstractmethod
    def place_after(self, prompt: str, *, last_message: str, is_continued: bool) -> Place:
        """Where the answer to a prompt begins.

        Args:
            prompt: the conversation as its template lays it out.
            last_message: the content of the last message. What it says counts where the answer goes on with it, else
                only what the template writes behind it.
            is_continued: whether the answer goes on with it.
        """

    @abstractmethod
    def around(self, then: AnswerReader, place: Place) -> ReasonedReader:
        """A reader of one answer that begins at a place, and leaves what is no reasoning to another."""

    @abstractmethod
    def before(self, place: Place, *, may_think: bool) -> list[dict[str, Any]]:
        """What stands before an answer that must match something, the reasoning; there need be none where it is not open."""

    def frame(self, place: Place, *, may_call: bool) -> list[dict[str, Any]]:  # noqa: ARG002
        """What must stand between the reasoning and an answer; `may_call`: what follows may be a call in this form."""
        return []

    @abstractmethod
    def num_tokens(self, token_ids: Sequence[int], tokenizer: Tokenizer, *, place: Place, is_cut: bool) -> int:
        """How many tokens of an answer with reasoning belong to that, its last mark included.

        Args:
            token_ids: of the answer.
            tokenizer: made them.
            place: where the answer begins.
            is_cut: whether it ends within reasoning.
        """


@dataclass(frozen=True)
class ReasoningMarks(ReasoningForm):
    """One mark before reasoning and one behind it."""

    begin: str
    end: str

    @property
    def marks(self) -> tuple[str, ...]:  # type: ignore[override]
        """Both."""
        return (self.begin, self.end)

    def __str__(self) -> str:
        """In words."""
        return f"between {self.begin} and {self.end}"

    def place_after(self, prompt: str, *, last_message: str, is_continued: bool) -> Place:
        """By the last mark at the end of what the template writes, or in what is continued."""
        text, said = prompt.rstrip(), last_message.strip()
        if is_continued and said:
            return self._place_in(said) or self._place_before(text.removesuffix(said).rstrip())
        is_talk = said not in self.marks and said.endswith(self.marks) and text.endswith(said)
        return Place.START if is_talk else self._place_at_end(text)

    def around(self, then: AnswerReader, place: Place) -> ReasonedReader:
        """A reader of the marks."""
        return ReasoningReader(self, place, then)

    def before(self, place: Place, *, may_think: bool) -> list[dict[str, Any]]:
        """Reasoning, or nothing where it is not open."""
        if not (place.is_reasoning or (place == Place.START and may_think)):
            return []
        begin = "" if place.is_reasoning else self.begin
        return [
            one_of(
                *(up_to(self.end + spaces, begin=begin) for spaces in SPACES),
                *([] if place.is_reasoning else [const("")]),
            )
        ]

    def num_tokens(self, token_ids: Sequence[int], tokenizer: Tokenizer, *, place: Place, is_cut: bool) -> int:  # noqa: ARG002
        """Up to and with the closing mark: by its token, or where it is none by what the tokens spell."""
        if is_cut:
            return len(token_ids)
        end_id = tokenizer.id_of(self.end)
        if end_id in token_ids:
            return token_ids.index(end_id) + 1
        return bisect_left(
            range(len(token_ids)),
            True,
            key=lambda count: self.end in tokenizer.decode(token_ids[:count], skip_special_tokens=False),
        )

    def _place_in(self, said: str) -> Place | None:
        """By the marks in what is continued, which reasoning begins or not at all; None where there is none."""
        if self.end in said:
            return Place.CLOSED if said.endswith(self.end) else Place.BEHIND
        if said.startswith(self.begin):
            return Place.OPENED if said == self.begin else Place.INSIDE
        return None

    def _place_before(self, text: str) -> Place:
        """By what stands before what is continued, which says nothing itself."""
        return Place.INSIDE if text.endswith(self.begin) else Place.BEHIND

    def _place_at_end(self, text: str) -> Place:
        if text.endswith(self.begin):
            return Place.OPENED
        return Place.CLOSED if text.endswith(self.end) else Place.START


class ReasoningReader:
    """Takes reasoning from the beginning of an answer, and leaves what follows to another reader.

    White space next to marks belongs to neither text. Reasoning begins at the start of the answer or not at all: a mark
    that stands elsewhere is something that is talked about. Text waits in `_rest` until it is understood.

    Args:
        marks: what stands around reasoning.
        place: where the text begins.
        then: reads what is no reasoning.
    """

    def __init__(self, marks: ReasoningMarks, place: Place, then: AnswerReader) -> None:
        self._marks = marks
        self.has_reasoned = place.is_reasoning
        self._then = then
        self._rest = ""
        self._events: list[AnswerEvent] = []
        self._read: Callable[[], bool] = {
            Place.START: self._read_start,
            Place.OPENED: self._read_opened,
            Place.INSIDE: self._read_inside,
            Place.CLOSED: self._read_closed,
            Place.BEHIND: self._read_behind,
        }[place]

    @property
    def is_reasoning(self) -> bool:
        """Whether reasoning has begun and not ended; after the end, that it was cut."""
        return self._read in (self._read_opened, self._read_inside)

    @property
    def is_calling(self) -> bool:
        """Whether a call has begun that is not whole."""
        return self._then.is_calling

    def push(self, text: str, *, finished: bool = False) -> list[AnswerEvent]:
        """Take more text; return what is certain now, at its end all that is left."""
        self._rest += text
        while self._read():  # each goes on where it can, and is asked again
            pass
        if finished:
            self._finish()
        events, self._events = self._events, []
        return events

    def _read_start(self) -> bool:
        """Up to the opening mark, if the answer begins with it."""
        text = self._rest.lstrip()
        if text.startswith(self._marks.begin):
            self._rest, self.has_reasoned = text.removeprefix(self._marks.begin), True
            return self._go_to(self._read_opened)
        return not self._marks.begin.startswith(text) and self._go_to(self._read_behind)

    def _read_opened(self) -> bool:
        """White space behind the opening mark."""
        self._rest = self._rest.lstrip()
        return bool(self._rest) and self._go_to(self._read_inside)

    def _read_inside(self) -> bool:
        """Reasoning; white space before the closing mark, and what may be its beginning, wait."""
        end = self._marks.end
        at = self._rest.find(end)
        if at >= 0:
            self._report(self._rest[:at].rstrip())
            self._rest = self._rest[at + len(end) :]
            return self._go_to(self._read_closed)
        certain = certain_length(self._rest, end)
        self._report(self._rest[:certain])
        self._rest = self._rest[certain:]
        return False

    def _read_closed(self) -> bool:
        """White space behind the closing mark."""
        self._rest = self._rest.lstrip()
        return bool(self._rest) and self._go_to(self._read_behind if self.has_reasoned else self._read_start)

    def _read_behind(self) -> bool:
        """What is no reasoning."""
        self._events += self._then.push(self._rest)
        self._rest = ""
        return False

    def _go_to(self, state: Callable[[], bool]) -> bool:
        self._read = state
        return True

    def _report(self, text: str) -> None:
        if text:
            self._events.append(Reasoning(text))

    def _finish(self) -> None:
        """The text is at its end: what waits is reasoning where that was cut, else what it is to the other reader."""
        if self.is_reasoning:
            self._report(self._rest)
            self._rest = ""
        self._events += self._then.push(self._rest, finished=True)
        self._rest = ""


THINK = ReasoningMarks("<think>", "</think>")
"""What most models write."""
