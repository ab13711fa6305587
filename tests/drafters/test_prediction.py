"""Drafts from a prediction follow the text in it, and find the place again where a naive search finds it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.draft import NO_DRAFT
from forerun.core.sampling_params import SamplingParams
from forerun.core.sequence import Sequence
from forerun.drafters.base import DraftContext, DraftRequest
from forerun.drafters.confidence import DEFAULT_THRESHOLD, confident_length
from forerun.drafters.guard import check_draft
from forerun.drafters.prediction import (
    FIRST_MATCH,
    LONGEST_MATCH,
    NEARBY,
    SURE_MATCH,
    PredictionDrafter,
    PredictionPlace,
    survival,
)

PREDICTED = list(range(10, 50))


def expecting(prediction, output=(), seq_id=0):
    return Sequence(
        seq_id=seq_id,
        prompt_ids=[1],
        output_ids=list(output),
        sampling=SamplingParams(),
        seed=0,
        prediction_ids=tuple(prediction),
    )


def drafted_after(prediction, output, *, max_tokens=8, max_depth=8, min_survival=0.0):
    drafter, sequence = PredictionDrafter(), expecting(prediction, output)
    drafter.start(sequence)
    request = DraftRequest(sequence, max_tokens, max_depth, min_survival=min_survival)
    (draft,) = drafter.propose(DraftContext(requests=[request]))
    return draft


def test_before_the_first_token_the_prediction_is_taken_at_its_word():
    draft = drafted_after(PREDICTED, [])
    assert draft.token_ids == tuple(PREDICTED[:8])
    assert draft.source == "prediction"


def test_a_text_that_does_what_was_predicted_is_drafted_to_the_end_of_the_prediction():
    assert drafted_after(PREDICTED, PREDICTED[:20]).token_ids == tuple(PREDICTED[20:28])
    assert drafted_after(PREDICTED, PREDICTED[:37]).token_ids == tuple(PREDICTED[37:])
    assert drafted_after(PREDICTED, PREDICTED) == NO_DRAFT


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        pytest.param([*PREDICTED[:9], 7], [], id="lost"),
        pytest.param([*PREDICTED[:9], 7, 20], [21], id="one token replaced"),
        pytest.param([*PREDICTED[:9], 7, 8, 9, *PREDICTED[9:11]], PREDICTED[11:14], id="some inserted"),
        pytest.param([*PREDICTED[:9], *PREDICTED[12:14]], PREDICTED[14:17], id="some left out"),
        pytest.param([*PREDICTED[:30], 7, *PREDICTED[2:4]], PREDICTED[4:7], id="gone back"),
        pytest.param([*PREDICTED[:30], 7, 12], [], id="one token is too little to go back"),
        pytest.param([*PREDICTED[:5], 7, PREDICTED[20]], [], id="one token is too little to go far ahead"),
        pytest.param([*PREDICTED[:5], 7, *PREDICTED[20:22]], PREDICTED[22:25], id="two go far ahead"),
    ],
)
def test_after_a_departure_the_longest_match_finds_the_place_again(written, expected):
    assert drafted_after(PREDICTED, written).token_ids == tuple(expected)


def test_a_match_after_the_departure_comes_before_one_in_front_of_it():
    prediction = [1, 2, 3, 4, 5, 6, 1, 2, 8]
    assert drafted_after(prediction, [1, 2, 3, 4, 9, 1, 2]).token_ids == (8,)


def test_a_draft_is_as_long_as_that_of_a_copy_with_the_same_match():
    draft = drafted_after(PREDICTED, [7, *PREDICTED[4:9]], max_tokens=30, max_depth=30)
    assert len(draft) == confident_length(5, threshold=DEFAULT_THRESHOLD, most=30)
    assert min(draft.survival) >= DEFAULT_THRESHOLD


@pytest.mark.parametrize(("least", "length"), [(0.9, 0), (0.5, 3), (0.3, 7), (0.1, 24)])
def test_who_knows_what_rows_cost_says_which_chance_is_worth_one(least, length):
    draft = drafted_after(PREDICTED, [7, *PREDICTED[4:9]], max_tokens=30, max_depth=30, min_survival=least)
    assert len(draft) == length
    assert all(chance >= least for chance in draft.survival or ())


def test_sequences_without_a_prediction_get_nothing_and_leave_no_trace():
    drafter = PredictionDrafter()
    free, empty, bound = expecting([], seq_id=1), expecting([], seq_id=2), expecting(PREDICTED, seq_id=3)
    for sequence in (free, empty, bound):
        drafter.start(sequence)
        drafter.start(sequence)
    requests = [DraftRequest(sequence, 4, 4) for sequence in (free, bound, empty)]
    drafts = drafter.propose(DraftContext(requests=requests))
    assert [draft.token_ids for draft in drafts] == [(), tuple(PREDICTED[:4]), ()]
    for sequence in (free, empty, bound, bound):
        drafter.stop(sequence)
    assert not drafter._places


def test_a_sequence_that_is_begun_again_is_followed_anew():
    drafter, sequence = PredictionDrafter(), expecting(PREDICTED, [*PREDICTED[:6], 7, 7])
    request = DraftRequest(sequence, 4, 4)
    drafter.start(sequence)
    drafter.propose(DraftContext(requests=[request]))
    drafter.stop(sequence)
    del sequence.output_ids[5:]
    drafter.start(sequence)
    (draft,) = drafter.propose(DraftContext(requests=[request]))
    assert draft.token_ids == tuple(PREDICTED[5:9])


# --- any texts ------------------------------------------------------------------------------------


def naive_place(prediction, text):
    """The definition, token by token, with a search through all places: (place or None, length of the match)."""
    place, departure, matched = 0, 0, FIRST_MATCH
    for end, token_id in enumerate(text, start=1):
        if place is not None and prediction[place : place + 1] == [token_id]:
            place, matched = place + 1, min(matched + 1, LONGEST_MATCH)
            departure = place if matched >= SURE_MATCH else departure
            continue

        def match(place, end=end):
            length = 0
            while length < min(place, end, LONGEST_MATCH) and prediction[place - 1 - length] == text[end - 1 - length]:
                length += 1
            return length

        later = range(departure + 1, len(prediction) + 1)
        place = max(later, key=lambda p: (match(p), -p), default=0)
        matched = match(place)
        if matched == 0 or (matched < SURE_MATCH and place - departure > NEARBY):
            place = max(range(departure + 1), key=lambda p: (match(p), p))
            matched = match(place)
            if matched < SURE_MATCH:
                place, matched = None, 0
    return place, matched


tokens = st.lists(st.integers(0, 3), max_size=30)


@settings(deadline=None, max_examples=500)
@given(prediction=st.lists(st.integers(0, 3), min_size=1, max_size=30), steps=st.lists(tokens, max_size=6))
def test_the_place_is_where_a_naive_search_finds_it_however_the_text_comes(prediction, steps):
    place, text = PredictionPlace(prediction), []
    for new in steps:
        text += new
        place.read(text)
        assert (place._place, place.match_length) == naive_place(prediction, text)


@settings(deadline=None, max_examples=300)
@given(prediction=tokens, text=tokens, max_tokens=st.integers(1, 9), max_depth=st.integers(1, 9))
def test_a_draft_is_a_piece_of_the_prediction_within_the_limits_with_falling_chances(
    prediction, text, max_tokens, max_depth
):
    draft = drafted_after(prediction, text, max_tokens=max_tokens, max_depth=max_depth)
    check_draft(draft, vocab_size=4)
    assert draft.is_chain
    assert len(draft) <= min(max_tokens, max_depth)
    pieces = [tuple(prediction[i : i + len(draft)]) for i in range(len(prediction) + 1)]
    assert draft.token_ids in pieces
    if draft.token_ids:
        assert all(before > after > 0 for before, after in pairwise((1.0, *draft.survival)))


def test_a_frequent_token_in_a_huge_prediction_is_looked_up_in_a_bounded_number_of_places(monkeypatch):
    place, looked_at = PredictionPlace([5, 6] * 50_000), []
    match_length = PredictionPlace._match_length

    def counted(self, at, text, end):
        looked_at.append(at)
        return match_length(self, at, text, end)

    monkeypatch.setattr(PredictionPlace, "_match_length", counted)
    place.read([7, 5, 7, 6, 7, 5])
    assert 0 < len(looked_at) <= 6 * 64


def test_chances_are_those_of_copies():
    chances = survival(3)
    assert chances[0] == pytest.approx(1 - 1 / 3)
    assert sum(chance >= DEFAULT_THRESHOLD for chance in chances) == confident_length(
        3, threshold=DEFAULT_THRESHOLD, most=99
    )
