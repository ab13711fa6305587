"""Reads calls that are JSON objects between marks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forerun.server.tools.base import Arguments, CallBegin, Content, Event
from forerun.server.tools.json_call import JsonCall

STRETCH = 4096  # characters at a time: what waits is copied at each mark


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


class JsonCallReader:
    """See `base.CallReader`.

    Text waits in `_rest` until it is understood, and in `_raw` while it may turn out to be no call.

    Args:
        marks: what stands around calls.
        names: functions that there are.
        is_forced: a call that has begun is one, and told at once.
    """

    def __init__(self, marks: Marks, names: frozenset[str], *, is_forced: bool) -> None:
        self.is_calling = False
        self._marks = marks
        self._names = names
        self._is_forced = is_forced
        self._rest = self._raw = ""
        self._call = JsonCall()
        self._num_told = 0  # characters of the arguments
        self._events: list[Event] = []
        self._read: Callable[[], bool] = self._read_start if marks.opens_text else self._read_text

    def push(self, text: str, *, finished: bool = False) -> list[Event]:
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
            self._tell_text(content)
            self._rest = self._rest[len(content) :]
            return self._take_mark(at - len(content))
        begun = next(
            (n for n in range(len(self._marks.begin) - 1, 0, -1) if self._rest.endswith(self._marks.begin[:n])), 0
        )
        certain = len(self._rest[: len(self._rest) - begun].rstrip())
        self._tell_text(self._rest[:certain])
        self._rest = self._rest[certain:]
        return False

    def _read_on(self) -> bool:
        """Text that holds no calls."""
        self._tell_text(self._rest)
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
        self._call, self._num_told = JsonCall(), 0
        return self._go_to(self._read_object)

    def _read_object(self) -> bool:
        self._take(self._call.push(self._rest))
        if self._call.is_wrong or (self._call.is_whole and not self._is_call):
            return self._give_back()
        if self._call.is_whole or (self._is_forced and self._call.name in self._names):
            self._tell_call()
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
        """It was no call: its text is content, unless it was told already."""
        if not self.is_calling:
            self._tell_text(self._raw)
        self.is_calling, self._raw = False, ""
        return self._go_to(self._read_on if self._marks.opens_text else self._read_text)

    def _tell_text(self, text: str) -> None:
        if text:
            self._events.append(Content(text))

    def _tell_call(self) -> None:
        """Tell what is new of a call."""
        if not self.is_calling:
            self._events.append(CallBegin(self._call.name or ""))
            self.is_calling = True
        arguments = self._call.arguments or ""
        if len(arguments) > self._num_told:
            self._events.append(Arguments(arguments[self._num_told :]))
            self._num_told = len(arguments)
        if self._call.is_whole:
            self.is_calling, self._raw = False, ""

    def _finish(self) -> None:
        """The text is at its end: what is not a whole call by now is content."""
        is_half_a_mark = self._read == self._read_after and self._may_go_on
        if not self.is_calling and not is_half_a_mark:
            self._tell_text(self._raw + self._rest)
        self._raw = self._rest = ""
