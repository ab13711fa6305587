"""Coloured tokens: every character once, in the style of the token that it came from."""

from __future__ import annotations

import io
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from forerun.cli.painting import TokenPainter
from forerun.core.outputs import StreamDelta
from forerun.core.verdict import Origin

GREEN, END = "\x1b[1;32m", "\x1b[0m"


def delta(text: str, token_ids: Sequence[int], origins: Sequence[Origin]) -> StreamDelta:
    return StreamDelta(request_id="0", index=0, text=text, token_ids=list(token_ids), origins=list(origins))


def paint(deltas: Sequence[StreamDelta], words: Sequence[str], *, colour: bool = True) -> str:
    """What the painter prints where token i is the text `words[i]`."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=colour, color_system="standard" if colour else None, width=20)
    painter = TokenPainter(console, words.__getitem__)
    for each in deltas:
        painter(each)
    return file.getvalue()


def test_accepted_tokens_are_coloured_and_others_are_not() -> None:
    step = delta("one two", [0, 1], [Origin.ACCEPTED, Origin.BONUS])
    assert paint([step], ["one", " two"]) == f"{GREEN}one{END} two"


def test_neighbours_of_one_style_are_one_run_of_colour() -> None:
    step = delta("abc", [0, 1, 2], [Origin.ACCEPTED, Origin.ACCEPTED, Origin.RECOVERED])
    assert paint([step], ["a", "b", "c"]) == f"{GREEN}ab{END}c"


def test_text_that_lags_behind_keeps_its_own_token_style() -> None:
    steps = [
        delta("a", [0, 1], [Origin.RECOVERED, Origin.ACCEPTED]),
        delta("bbc", [2], [Origin.RECOVERED]),
    ]
    assert paint(steps, ["a", "bb", "c"]) == f"a{GREEN}bb{END}c"


def test_text_without_known_token_is_still_printed() -> None:
    assert paint([delta("a!", [0], [Origin.BONUS])], ["a"]) == "a!"


@settings(deadline=None, max_examples=60)
@given(
    words=st.lists(st.text("ab \n[]é", min_size=0, max_size=4), min_size=1, max_size=12),
    cuts=st.lists(st.integers(0, 40), max_size=6),
)
def test_no_character_is_lost_or_doubled(words: list[str], cuts: list[int]) -> None:
    text = "".join(words)
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    texts = [text[low:high] for low, high in zip(borders, borders[1:], strict=False)]
    ids = list(range(len(words)))
    steps = [delta(texts[0], ids, [Origin.ACCEPTED] * len(ids)), *(delta(part, [], []) for part in texts[1:])]
    assert paint(steps, words, colour=False) == text
