"""Text in which the tokens that came from accepted drafts are coloured."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

from rich.console import Console

from forerun.core.outputs import StreamDelta
from forerun.core.verdict import Origin
from forerun.server.origins import TokenSpans

ACCEPTED_STYLE = "bold green"
LEGEND = f"[{ACCEPTED_STYLE}]accepted draft tokens[/], the target's own tokens"


class TokenPainter:
    """Prints the deltas of one completion, each token's text in the style of its origin.

    `push` returns the text that became certain with the next token, as `TextStream.push` does.
    """

    def __init__(self, console: Console, push: Callable[[int], str]) -> None:
        self._console = console
        self._spans: TokenSpans[Origin] = TokenSpans(push)

    def __call__(self, delta: StreamDelta) -> None:
        """Print what a delta brought."""
        spans = self._spans.cut(delta.text, zip(delta.token_ids, delta.origins, strict=True))
        for accepted, run in groupby(spans, key=lambda span: span[1] is Origin.ACCEPTED):
            text = "".join(span for span, _ in run)
            self._console.out(text, style=ACCEPTED_STYLE if accepted else None, end="", highlight=False)
