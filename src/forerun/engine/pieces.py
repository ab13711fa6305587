"""The text of a stream, cut at the borders of its tokens, each piece with what is known of its token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Generic, TypeVar

Note = TypeVar("Note")


class TokenPieces(Generic[Note]):
    """Says which part of a completion's text came from which token.

    A delta's text may lag behind its tokens (a character of several tokens, half a stop string),
    so tokens wait in a window until all of its text is out.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[tuple[int, Note]] = []
        self._num_given = 0  # characters of the window's text

    def cut(self, text: str, tokens: Iterable[tuple[int, Note]]) -> list[tuple[str, Note]]:
        """Add a delta's tokens, (id, note) each, and cut its text; the pieces join to `text` where there are tokens."""
        self._window += tokens
        ids = [token_id for token_id, _ in self._window]
        ends = [len(self._decode(ids[:count])) for count in range(len(ids) + 1)]
        start, stop = self._num_given, self._num_given + len(text)
        pieces = []
        for (low, high), (_, note) in zip(pairwise(ends), self._window, strict=True):
            piece = text[max(low - start, 0) : max(high - start, 0)]
            if piece:
                pieces.append((piece, note))
        rest = text[sum(len(piece) for piece, _ in pieces) :]
        if rest and self._window:
            pieces.append((rest, self._window[-1][1]))
        self._num_given = stop
        if stop >= ends[-1]:
            self._window, self._num_given = [], 0
        return pieces
