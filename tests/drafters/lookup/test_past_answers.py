"""Past answers: kept for their salt, found again, within the budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.drafters.lookup.past_answers import FEWEST_TOKENS, PastAnswers
from forerun.drafters.lookup.text_index import BREAK, BYTES_PER_TOKEN
from tests.memory import bytes_kept

SMALLEST = FEWEST_TOKENS * BYTES_PER_TOKEN + 2500  # bytes, of one index with its objects


def following(answers: PastAnswers, salt: str | None, gram: list[int]) -> int:
    index = answers.of(salt)
    if index is None:
        return BREAK
    place = index.look_up(gram)
    return index.token_at(place) if place else BREAK


def test_an_answer_is_found_by_its_salt_alone():
    answers = PastAnswers(vocab_size=5000, max_bytes=10 * SMALLEST)
    answers.add([1, 2, 3, 4, 5], "mine")
    assert following(answers, "mine", [1, 2, 3, 4]) == 5
    assert following(answers, "yours", [1, 2, 3, 4]) == BREAK
    assert following(answers, None, [1, 2, 3, 4]) == BREAK


def test_budget_of_zero_keeps_nothing():
    answers = PastAnswers(vocab_size=5000, max_bytes=0)
    answers.add(list(range(100)), None)
    assert answers.of(None) is None
    assert answers.num_bytes == 0


def test_of_an_answer_longer_than_the_budget_the_end_is_kept():
    answers = PastAnswers(vocab_size=5000, max_bytes=SMALLEST)
    answers.add(list(range(5000)), None)
    assert following(answers, None, [4990, 4991, 4992, 4993]) == 4994
    assert following(answers, None, [10, 11, 12, 13]) == BREAK


def test_the_salt_used_for_longest_ago_makes_room():
    answers = PastAnswers(vocab_size=5000, max_bytes=2 * SMALLEST)
    for salt in ("first", "second"):
        answers.add([1, 2, 3, 4, 5], salt)
    answers.add([1, 2, 3, 4, 6], "first")
    answers.add([1, 2, 3, 4, 7], "third")
    assert answers.of("second") is None
    assert following(answers, "first", [1, 2, 3, 4]) == 6
    assert following(answers, "third", [1, 2, 3, 4]) == 7


def test_answers_stay_when_the_index_grows():
    answers = PastAnswers(vocab_size=5000, max_bytes=64 * SMALLEST)
    answers.add([7, 8, 9, 10, 11], None)
    for number in range(20):
        answers.add([100 + number] * 400, None)
    assert following(answers, None, [7, 8, 9, 10]) == 11


def test_exported_answers_are_found_after_import():
    answers = PastAnswers(vocab_size=5000, max_bytes=64 * SMALLEST)
    answers.add([1, 2, 3, 4, 5], "a")
    answers.add([5, 4, 3, 2, 1], "a")
    answers.add([6, 7, 8, 9, 10], None)
    again = PastAnswers(vocab_size=5000, max_bytes=64 * SMALLEST)
    again.from_arrays(answers.to_arrays())
    assert following(again, "a", [1, 2, 3, 4]) == 5
    assert following(again, "a", [5, 4, 3, 2]) == 1
    assert following(again, None, [6, 7, 8, 9]) == 10
    assert following(again, None, [1, 2, 3, 4]) == BREAK


@settings(deadline=None, max_examples=30)
@given(
    added=st.lists(st.tuples(st.sampled_from([None, "a", "b", "c"]), st.integers(1, 3000)), max_size=30),
    num_indexes=st.integers(0, 6),
)
def test_all_salts_together_stay_within_the_budget_and_the_latest_answer_is_kept(added, num_indexes):
    answers = PastAnswers(vocab_size=5000, max_bytes=num_indexes * SMALLEST)
    for salt, length in added:
        answers.add(list(range(length)), salt)
        assert answers.num_bytes <= num_indexes * SMALLEST
        if num_indexes and length > 8:
            # one of the two, as the first place of the ring, 0, is none
            found = [following(answers, salt, list(range(at - 4, at))) == at for at in (length - 1, length - 2)]
            assert any(found)


@pytest.mark.parametrize(
    "tokens",
    [np.array([1, 5000, BREAK], np.int32), np.array([1, -2], np.int32), np.array([1.5]), np.array([[1]], np.int32)],
)
def test_arrays_that_are_no_answers_are_refused_and_nothing_is_kept_of_them(tokens):
    answers = PastAnswers(vocab_size=5000, max_bytes=SMALLEST)
    good = np.array([1, 2, 3, 4, 5, BREAK], np.int32)
    with pytest.raises(ValueError, match="past answers: "):
        answers.from_arrays({None: {"tokens": good}, "a": {"tokens": tokens}})
    assert answers.of(None) is None


def test_real_memory_stays_within_the_budget_while_salts_change_and_are_long():
    with bytes_kept() as kept:
        answers = PastAnswers(vocab_size=5000, max_bytes=1_000_000)
        for number in range(300):
            answers.add(list(range(number)), str(number) * 500)
        assert 500_000 < kept() <= 1_000_000
