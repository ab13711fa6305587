"""Text in which the tokens that came from accepted drafts are coloured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby, pairwise

from rich.console import Console

from forerun.core.outputs import StreamDelta
from forerun.core.verdict import Origin

ACCEPTED_STYLE = "bold green"
LEGEND = f"[{ACCEPTED_STYLE}]accepted draft tokens[/], the target's own tokens"


class TokenPainter:
    """Prints the deltas of one completion, each token's text in the style of its origin.

    A delta's text may lag behind its tokens (a character of several tokens, half a stop string),
    so tokens wait in a window until all of its text is out.
    """

    def __init__(self, console: Console, decode: Callable[[Sequence[int]], str]) -> None:
        self._console = console
        self._decode = decode
        self._window: list[tuple[int, Origin]] = []
        self._num_shown = 0  # characters of the window's text

    def __call__(self, delta: StreamDelta) -> None:
        """Print what a delta brought."""
        self._window += zip(delta.token_ids, delta.origins, strict=True)
        for accepted, pieces in groupby(self._pieces(delta.text), key=lambda piece: piece[1] is Origin.ACCEPTED):
            text = "".join(piece for piece, _ in pieces)
            self._console.out(text, style=ACCEPTED_STYLE if accepted else None, end="", highlight=False)

    def _pieces(self, text: str) -> list[tuple[str, Origin]]:
        """`text` cut at the borders of the window's tokens."""
        ids = [token_id for token_id, _ in self._window]
        ends = [len(self._decode(ids[:count])) for count in range(len(ids) + 1)]
        start, stop = self._num_shown, self._num_shown + len(text)
        pieces = []
        for (low, high), (_, origin) in zip(pairwise(ends), self._window, strict=True):
            piece = text[max(low - start, 0) : max(high - start, 0)]
            if piece:
                pieces.append((piece, origin))
        rest = text[sum(len(piece) for piece, _ in pieces) :]
        if rest and self._window:
            pieces.append((rest, self._window[-1][1]))
        self._num_shown = stop
        if stop >= ends[-1]:
            self._window, self._num_shown = [], 0
        return pieces
