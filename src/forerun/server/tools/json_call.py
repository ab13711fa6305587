"""One call written as a JSON object, followed as its text grows."""

from __future__ import annotations

import json
import re

from forerun.server.limits import MOST_TOOL_DEPTH

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
