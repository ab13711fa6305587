"""Reads tool calls, JSON objects between marks, from a text as it grows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from forerun.models.chat.events import AnswerEvent, Arguments, CallBegin, Content, certain_length

STRETCH = 4096  # characters at a time: what waits is copied at each mark
MOST_TOOL_DEPTH = 64  # levels of brackets in a schema or in arguments
ARGUMENTS = ("arguments", "parameters")
KEYS = frozenset({"name", "type", "id", *ARGUMENTS})
"""Keys that calls have in one form or another; an object with others is none."""

PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # characters of a string
SCALAR = frozenset("+-.0123456789eEtrufalsn")
CLOSING = {"{": "}", "[": "]"}


class JsonCall:
    """Follows an object to its end, or to where it cannot be a call any more (`is_wrong`).

    Brackets, strings and keys are checked on the way, all else when the object is whole.
    """

    def __init__(self) -> None:
        self.text = ""
        self.is_whole = False
        self.is_wrong = False
        self._brackets: list[str] = []
        self._string_at: int | None = None  # in a string, which began there
        self._is_escaped = False
        self._last_string = '""'
        self._key: str | None = None  # of the object itself; its value comes or has begun
        self._value_at: int | None = None
        self._values: dict[str, str] = {}  # key -> JSON text

    def push(self, text: str) -> int:
        """Take text as far as it belongs to the object; return how much that is."""
        before = at = len(self.text)
        self.text += text
        while at < len(self.text) and not (self.is_whole or self.is_wrong):
            at = self._outside(at) if self._string_at is None else self._inside(at, self._string_at)
        self.text = self.text[:at]
        return at - before

    @property
    def name(self) -> str | None:
        """The function's name, once it is known."""
        try:
            name = json.loads(self._values["name"])
        except (KeyError, ValueError):
            return None
        return name if isinstance(name, str) else None

    @property
    def arguments(self) -> str | None:
        """The arguments' JSON text as far as it goes; None before it begins, "{}" where a whole call has none."""
        if self._key in ARGUMENTS and self._value_at is not None:
            return self.text[self._value_at :]
        return next((self._values[key] for key in ARGUMENTS if key in self._values), "{}" if self.is_whole else None)

    @property
    def is_valid(self) -> bool:
        """Whether the whole object is JSON, and a call."""
        try:
            json.loads(self.text)
            arguments = json.loads(self.arguments or "")
        except ValueError:
            return False
        return self.name is not None and isinstance(arguments, dict)

    def _inside(self, at: int, began: int) -> int:
        """Go on in a string."""
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        found = PLAIN.match(self.text, at)
        at = at if found is None else found.end()
        match self.text[at : at + 1]:
            case '"':
                self._string_at, self._last_string = None, self.text[began : at + 1]
                if len(self._brackets) == 1:
                    self._end_value(at + 1)
            case "\\":
                self._is_escaped = True
            case "":
                return at
            case _:
                return self._refuse(at)
        return at + 1

    def _outside(self, at: int) -> int:
        """Go on between strings."""
        character, is_own = self.text[at], len(self._brackets) == 1
        if is_own and character not in " \t\r\n:,}" and self._key is not None and self._value_at is None:
            self._value_at = at
        match character:
            case '"':
                self._string_at = at
            case "{" | "[" if len(self._brackets) < MOST_TOOL_DEPTH:
                self._brackets.append(character)
            case "}" | "]" if self._brackets and character == CLOSING[self._brackets[-1]]:
                self._close(at)
            case ":" if is_own:
                self._begin_value()
            case "," if is_own:
                self._end_value(at)
            case " " | "\t" | "\r" | "\n" | ":" | ",":
                pass
            case _ if character not in SCALAR:
                return self._refuse(at)
        return at if self.is_wrong else at + 1

    def _close(self, at: int) -> None:
        self._brackets.pop()
        if len(self._brackets) < 2:
            self._end_value(at + 1 if self._brackets else at)
        self.is_whole = not self._brackets

    def _begin_value(self) -> None:
        try:
            self._key = json.loads(self._last_string)
        except ValueError:
            self._key = None
        self.is_wrong = self._key not in KEYS

    def _end_value(self, end: int) -> None:
        if self._key is not None and self._value_at is not None:
            self._values[self._key] = self.text[self._value_at : end].strip()
            self._key = self._value_at = None

    def _refuse(self, at: int) -> int:
        self.is_wrong = True
        return at


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What stands around calls; white space may stand between all of it.

    `begin` stands before a call or a list of them, then `opening`, between calls of a list `separator`
    (empty: there are no lists), after them `closing`. Where `opens_text`, calls are all of a text, and
    the first one begins it, with `begin` or without.
    """

    begin: str
    opening: str = ""
    separator: str = ""
    closing: str = ""
    opens_text: bool = False


class CallReader:
    """Finds calls in a text as it grows.

    A call counts when it is whole and names a known function; what only looks like one is content.
    White space around calls belongs to them; no other text is lost, and no text raises. After the end
    `is_calling` says whether a call was cut. Text waits in `_rest` until it is understood, and in `_raw` while it may turn out to be no call.

    Args:
        marks: what stands around calls.
        names: functions that there are.
        is_forced: a call that has begun is one, and reported at once.
    """

    def __init__(self, marks: Marks, names: frozenset[str], *, is_forced: bool) -> None:
        self.is_calling = False  # a call has begun that is not whole yet
        self._marks = marks
        self._names = names
        self._is_forced = is_forced
        self._rest = self._raw = ""
        self._call = JsonCall()
        self._num_reported = 0  # characters of the arguments
        self._events: list[AnswerEvent] = []
        self._read: Callable[[], bool] = self._read_start if marks.opens_text else self._read_text

    def push(self, text: str, *, finished: bool = False) -> list[AnswerEvent]:
        """Take more text; return what is certain now, at its end all that is left."""
        for at in range(0, len(text), STRETCH):
            self._rest += text[at : at + STRETCH]
            while self._read():  # each goes on where it can, and is asked again
                pass
        if finished:
            self._finish()
        events, self._events = self._events, []
        return events

    def _read_start(self) -> bool:
        """The beginning of a text whose calls are all of it."""
        text = self._rest.lstrip()
        if text.startswith("{"):
            return self._go_to(self._read_opening)
        if text.startswith(self._marks.begin):
            return self._take_mark(len(self._rest) - len(text))
        return not self._marks.begin.startswith(text) and self._go_to(self._read_on)

    def _read_text(self) -> bool:
        """Text up to a mark; white space before the mark, and what may be its beginning, wait."""
        at = self._rest.find(self._marks.begin)
        if at >= 0:
            content = self._rest[:at].rstrip()
            self._report_text(content)
            self._rest = self._rest[len(content) :]
            return self._take_mark(at - len(content))
        certain = certain_length(self._rest, self._marks.begin)
        self._report_text(self._rest[:certain])
        self._rest = self._rest[certain:]
        return False

    def _read_on(self) -> bool:
        """Text that holds no calls."""
        self._report_text(self._rest)
        self._rest = ""
        return False

    def _read_opening(self) -> bool:
        """What stands between a mark and its first call."""
        return self._read_until_object(self._marks.opening)

    def _read_next(self) -> bool:
        """What stands between a separator and the next call."""
        return self._read_until_object("")

    def _read_until_object(self, opening: str) -> bool:
        text = self._rest.lstrip()
        if not text.startswith(opening):
            return not opening.startswith(text) and self._give_back()
        text = text[len(opening) :].lstrip()
        if not text:
            return False
        if text[0] != "{":
            return self._give_back()
        self._take(len(self._rest) - len(text))
        self._call, self._num_reported = JsonCall(), 0
        return self._go_to(self._read_object)

    def _read_object(self) -> bool:
        self._take(self._call.push(self._rest))
        if self._call.is_wrong or (self._call.is_whole and not self._is_call):
            return self._give_back()
        if self._call.is_whole or (self._is_forced and self._call.name in self._names):
            self._report_call()
        return self._call.is_whole and self._go_to(self._read_after)

    @property
    def _is_call(self) -> bool:
        return self.is_calling or (self._call.is_valid and self._call.name in self._names)

    def _read_after(self) -> bool:
        """After a call: another one of the list, or the end of the list."""
        self._rest = self._rest.lstrip()
        for mark, after in ((self._marks.separator, self._read_next), (self._marks.closing, self._read_between)):
            if mark and self._rest.startswith(mark):
                self._take(len(mark))
                self._raw = self._raw if after == self._read_next else ""
                return self._go_to(after)
        return not self._may_go_on and self._go_to(self._read_between)

    @property
    def _may_go_on(self) -> bool:
        """Whether what is there may become a mark that follows a call."""
        return any(mark.startswith(self._rest) for mark in (self._marks.separator, self._marks.closing) if mark)

    def _read_between(self) -> bool:
        """After a list of calls."""
        self._rest = self._rest.lstrip()
        return bool(self._rest) and self._go_to(self._read_on if self._marks.opens_text else self._read_text)

    def _go_to(self, state: Callable[[], bool]) -> bool:
        self._read = state
        return True

    def _take_mark(self, num_spaces: int) -> bool:
        self._take(num_spaces + len(self._marks.begin))
        return self._go_to(self._read_opening)

    def _take(self, num_characters: int) -> None:
        """Keep what was understood, as long as it may be no call."""
        self._raw += self._rest[:num_characters]
        self._rest = self._rest[num_characters:]

    def _give_back(self) -> bool:
        """It was no call: its text is content, unless it was reported already."""
        if not self.is_calling:
            self._report_text(self._raw)
        self.is_calling, self._raw = False, ""
        return self._go_to(self._read_on if self._marks.opens_text else self._read_text)

    def _report_text(self, text: str) -> None:
        if text:
            self._events.append(Content(text))

    def _report_call(self) -> None:
        """Report what is new of a call."""
        if not self.is_calling:
            self._events.append(CallBegin(self._call.name or ""))
            self.is_calling = True
        arguments = self._call.arguments or ""
        if len(arguments) > self._num_reported:
            self._events.append(Arguments(arguments[self._num_reported :]))
            self._num_reported = len(arguments)
        if self._call.is_whole:
            self.is_calling, self._raw = False, ""

    def _finish(self) -> None:
        """The text is at its end: what is not a whole call by now is content, or of a forced call that is cut before its name nothing."""
        is_half_a_mark = self._read == self._read_after and self._may_go_on
        is_cut_call = self._is_forced and self._read in (self._read_opening, self._read_next, self._read_object)
        if not self.is_calling and not is_half_a_mark and not is_cut_call:
            self._report_text(self._raw + self._rest)
        self._raw = self._rest = ""
