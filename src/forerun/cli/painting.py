"""Text in which the tokens that came from accepted drafts are coloured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from rich.console import Console

from forerun.core.outputs import StreamDelta
from forerun.core.verdict import Origin
from forerun.engine.pieces import TokenPieces

ACCEPTED_STYLE = "bold green"
LEGEND = f"[{ACCEPTED_STYLE}]accepted draft tokens[/], the target's own tokens"


class TokenPainter:
    """Prints the deltas of one completion, each token's text in the style of its origin."""

    def __init__(self, console: Console, decode: Callable[[Sequence[int]], str]) -> None:
        self._console = console
        self._pieces: TokenPieces[Origin] = TokenPieces(decode)

    def __call__(self, delta: StreamDelta) -> None:
        """Print what a delta brought."""
        pieces = self._pieces.cut(delta.text, zip(delta.token_ids, delta.origins, strict=True))
        for accepted, run in groupby(pieces, key=lambda piece: piece[1] is Origin.ACCEPTED):
            text = "".join(piece for piece, _ in run)
            self._console.out(text, style=ACCEPTED_STYLE if accepted else None, end="", highlight=False)
