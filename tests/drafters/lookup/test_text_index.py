"""The index finds what a scan of the text finds, within its ring."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.drafters.lookup.text_index import BREAK, BYTES_PER_TOKEN, LONGEST_MATCH, TextIndex

tokens = st.integers(0, 3)
texts = st.lists(tokens, max_size=60)


def scan(text: list[int], ending: list[int], sizes: tuple[int, ...]) -> int:
    """The definition: the latest place behind the longest gram, with a token after it."""
    for size in sizes:
        gram = ending[len(ending) - size :] if len(ending) >= size else None
        for place in range(len(text) - 1, size - 1, -1):
            if gram is not None and text[place - size : place] == gram and BREAK not in gram:
                return place
    return 0


@settings(deadline=None)
@given(text=texts, path=st.lists(tokens, max_size=4))
def test_index_finds_what_a_scan_finds(text, path):
    index = TextIndex((3, 1), capacity=4096)  # so large that the few grams of four tokens share no slot
    index.extend(text)
    assert index.look_up(text + path) == scan(text, text + path, (3, 1))


@settings(deadline=None)
@given(parts=st.lists(st.lists(tokens, min_size=1, max_size=12), max_size=12), ending=texts)
def test_a_place_found_is_behind_the_gram_also_where_grams_share_slots_and_the_ring_is_full(parts, ending):
    index = TextIndex((3,), capacity=16)
    for part in parts:
        index.extend([*part, BREAK])
    latest = index.latest().tolist()
    assert len(latest) <= 15
    assert latest == [token_id for part in parts for token_id in [*part, BREAK]][-len(latest) :]
    place = index.look_up(ending)
    if place:
        gram = ending[-3:]
        assert index.match_length(place, ending) >= 3
        assert any(latest[at : at + 3] == gram for at in range(len(latest)))


@given(text=st.lists(tokens, min_size=1, max_size=80))
def test_match_length_counts_equal_tokens_up_to_the_longest(text):
    index = TextIndex((1,), capacity=256)
    index.extend(text)
    place = index.look_up(text)
    if place:
        naive = 0
        while naive < place and text[place - 1 - naive] == text[len(text) - 1 - naive]:
            naive += 1
        assert index.match_length(place, text) == min(naive, LONGEST_MATCH)


def test_no_match_crosses_the_break_between_texts():
    index = TextIndex((2,), capacity=64)
    index.extend([5, 1, BREAK, 2, 7, BREAK])
    assert index.look_up([1, 2]) == 0


def test_the_end_of_a_text_does_not_match_itself():
    index = TextIndex((3, 1), capacity=64)
    index.extend([1, 2, 3])
    assert index.look_up([1, 2, 3]) == 0


def test_tokens_at_the_border_of_the_vocabulary_are_tokens_like_others():
    index = TextIndex((3, 1), capacity=64)
    index.extend([0, 2**31 - 1, 0, 7, 0, 2**31 - 1, 0])
    place = index.look_up([0, 2**31 - 1, 0])
    assert index.token_at(place) == 7


def test_memory_is_what_the_capacity_says():
    assert TextIndex((4,), capacity=1024).num_bytes == 1024 * BYTES_PER_TOKEN
