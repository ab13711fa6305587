"""The text of one completion as it grows: stop strings found, and held back while undecided."""

from __future__ import annotations

from typing import Protocol


class TokenText(Protocol):
    """Turns token ids into text that is certain, one token at a time."""

    def push(self, token_id: int) -> str:
        """Add a token; return the text that became certain with it."""
        ...


class CompletionText:
    """Text of a completion under stop strings.

    `text` is all certain text, cut at the first stop string. What may still turn out to be the
    beginning of a stop string is in `text` but is not handed out by `take_delta` until decided.
    """

    def __init__(self, tokens: TokenText, *, stop: tuple[str, ...] = (), include_stop: bool = False) -> None:
        self.text = ""
        self._tokens = tokens
        self._stop = stop
        self._include_stop = include_stop
        self._longest_stop = max(map(len, stop), default=0)
        self._num_taken = 0

    def push(self, token_id: int, *, stops_count: bool = True) -> str | None:
        """Add a token; return the stop string that its text completed, if any.

        With `stops_count` false (before min_tokens) stop strings are ordinary text.
        """
        new = self._tokens.push(token_id)
        if not new:
            return None
        self.text += new
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
        end = len(self.text) if finished else len(self.text) - self._undecided()
        delta = self.text[self._num_taken : end]
        self._num_taken = max(self._num_taken, end)
        return delta

    def _undecided(self) -> int:
        """Length of the longest end of `text` that is a proper beginning of a stop string."""
        for length in range(min(self._longest_stop - 1, len(self.text)), 0, -1):
            tail = self.text[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0
