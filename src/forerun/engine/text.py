"""The text of one completion as it grows: stop strings found, and held back while undecided."""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

MOST_KEPT_STOPS = 256  # whose borders are kept, as many requests have the same


class Detokenizer(Protocol):
    """Turns token ids into text that is certain, one token at a time."""

    def push(self, token_id: int) -> str:
        """Add a token; return the text that became certain with it."""
        ...


class CompletionText:
    """Text of a completion under stop strings.

    `text` is all certain text, cut at the first stop string. What may still turn out to be the
    beginning of a stop string is in `text` but is not handed out by `take_delta` until decided.
    """

    def __init__(self, detokenizer: Detokenizer, *, stop: tuple[str, ...], include_stop: bool = False) -> None:
        self.text = ""
        self._detokenizer = detokenizer
        self._stop = stop
        self._include_stop = include_stop
        self._beginnings = [Beginning(string) for string in stop]
        self._num_taken = 0

    def push(self, token_id: int, *, stops_count: bool = True) -> str | None:
        """Add a token; return the stop string that its text completed, if any.

        With `stops_count` false (before min_tokens) stop strings are ordinary text.
        """
        new = self._detokenizer.push(token_id)
        if not new:
            return None
        self.text += new
        for beginning in self._beginnings:
            beginning.add(new)
        if not self._stop or not stops_count:
            return None
        return self._cut_at_stop(num_seen=len(self.text) - len(new))

    def _cut_at_stop(self, *, num_seen: int) -> str | None:
        """Cut `text` at the earliest stop string that ends after `num_seen` characters (the longest of equals)."""
        starts = ((stop, max(num_seen - len(stop) + 1, 0)) for stop in self._stop)
        found = [(at, -len(stop), stop) for stop, start in starts if (at := self.text.find(stop, start)) >= 0]
        if not found:
            return None
        at, _, stop = min(found)
        self.text = self.text[: at + len(stop) if self._include_stop else at]
        return stop

    def take_delta(self, *, finished: bool) -> str:
        """The text not handed out yet; unless finished, without what may begin a stop string."""
        end = len(self.text) if finished else len(self.text) - self._num_undecided
        delta = self.text[self._num_taken : end]
        self._num_taken = max(self._num_taken, end)
        return delta

    @property
    def _num_undecided(self) -> int:
        """Length of the longest end of `text` that is a proper beginning of a stop string."""
        return max((beginning.length for beginning in self._beginnings), default=0)


class Beginning:
    """How much of a stop string's beginning a growing text ends with, never the whole of it.

    Each character is looked at once (Knuth, Morris and Pratt's way), whatever the string's length.
    """

    def __init__(self, stop: str) -> None:
        self.length = 0
        self._stop = stop
        self._borders = borders(stop)

    def add(self, text: str) -> None:
        """Add to the text's end."""
        stop, ends, length = self._stop, self._borders, self.length
        for character in text:
            while length and stop[length] != character:
                length = ends[length - 1]
            if stop[length] == character:
                length += 1
            if length == len(stop):
                length = ends[-1]
        self.length = length


@lru_cache(maxsize=MOST_KEPT_STOPS)
def borders(stop: str) -> tuple[int, ...]:
    """Of each of the string's beginnings, the length of its longest proper end that is a beginning too."""
    found, length = [0], 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = found[length - 1]
        length += stop[length] == character
        found.append(length)
    return tuple(found)
