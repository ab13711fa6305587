"""What commands show of a measurement's progress."""

from __future__ import annotations

import io

from rich.console import Console

from forerun.cli.output import bar


def test_a_bar_shows_how_much_is_done_and_what_is_measured() -> None:
    text = io.StringIO()
    with bar(Console(file=text, force_terminal=True, width=120)) as shown:
        shown.progress("round 1 of 2: [3] of 5")
        shown.advance(0.4)
    assert "40%" in text.getvalue()
    assert "round 1 of 2: [3] of 5" in text.getvalue()


def test_without_a_terminal_no_bar_is_shown() -> None:
    text = io.StringIO()
    with bar(Console(file=text, force_terminal=False)) as shown:
        shown.advance(0.4)
    assert not text.getvalue()
