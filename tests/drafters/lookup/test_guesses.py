"""Copies that an edit breaks off are taken up again behind it."""

from __future__ import annotations

import pytest

from forerun.drafters.lookup.guesses import LONGEST_EDIT, LONGEST_INSERTION, place_at_end, take
from forerun.drafters.lookup.hit_rates import HitRates
from forerun.drafters.lookup.live_text import LiveText
from tests.drafters.texts import sequence

SOURCE = list(range(100, 140))
ELSEWHERE = [115, 90]  # a token of the source, and what follows it in another place


def copied_next(prompt: list[int], answer: list[int]) -> int:
    """The token that the own text's copy predicts behind a prompt and an answer."""
    text = LiveText(sequence(prompt))
    text.reserve(len(prompt) + len(answer) + 1)
    text.index.extend(prompt)
    take(text, answer, HitRates())
    return place_at_end(text).predicted[0]


@pytest.mark.parametrize(
    ("written", "resumes_at"),
    [
        ([1, 115], 16),  # one token for five
        ([1, 2, 3, 110], 11),  # three tokens put in
        ([112], 13),  # two tokens left out
        ([1] * LONGEST_INSERTION + [111], 12),
    ],
)
def test_a_copy_goes_on_behind_an_edit_as_soon_as_one_token_agrees(written, resumes_at):
    assert copied_next([*SOURCE, *ELSEWHERE], [*SOURCE[:10], *written]) == SOURCE[resumes_at]


@pytest.mark.parametrize(
    "written",
    [
        [1, SOURCE[10 + LONGEST_EDIT]],  # too much is left out
        [*range(1, LONGEST_INSERTION + 2), 115],  # too much is put in
    ],
)
def test_far_behind_an_edit_the_latest_place_is_copied(written):
    prompt = [*SOURCE, written[-1], 90]
    assert copied_next(prompt, [*SOURCE[:10], *written]) == 90


def test_a_longer_match_elsewhere_is_preferred_to_the_copy_behind_an_edit():
    assert copied_next([*SOURCE, 1, 2, 112, 90], [*SOURCE[:10], 1, 2, 112]) == 90


def test_a_short_copy_that_goes_wrong_is_not_looked_for_again():
    assert copied_next([*SOURCE, *ELSEWHERE], [110, 111, 1, 115]) == 90
