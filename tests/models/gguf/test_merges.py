"""The pairs of pieces that make a piece: found at once as one by one."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers.models import BPE

from forerun.models.gguf import merges
from forerun.models.gguf.merges import (
    LONGEST_WORD,
    MergesById,
    merges_of,
    pairs_by_hash,
    pairs_one_by_one,
    used_merges_of,
    used_merges_one_by_one,
)
from tests.native import every_level

WORDS = st.lists(st.text("ab▁é🙂\x00", max_size=8), min_size=1, max_size=40, unique=True)


def triples(found):
    return {tuple(row) for row in np.stack(found, axis=1).tolist()}


def slowly_merged(words, scores):
    """The definition, pair by pair."""
    pairs = [(word[:end], word[end:]) for word in words for end in range(1, len(word))]
    pairs = [pair for pair in pairs if pair[0] in words and pair[1] in words]
    index = {word: place for place, word in enumerate(words)}
    return sorted(pairs, key=lambda p: (-scores[index[p[0] + p[1]]], -len(p[0]), -len(p[1]), index[p[0] + p[1]]))


@given(WORDS)
@example([])
@example([""])
@example(["a"])
def test_all_pairs_are_among_those_found_by_hash(words):
    found = triples(pairs_by_hash(words))
    assert found >= triples(pairs_one_by_one(words))


@given(WORDS, st.integers(0, 2**20))
def test_merges_are_in_the_order_of_scores_then_lengths_then_ids(words, seed):
    scores = np.random.default_rng(seed).integers(-3, 0, len(words)).astype(np.float64)
    assert merges_of({word: index for index, word in enumerate(words)}, scores) == slowly_merged(words, scores)


@given(words=WORDS, most=st.integers(1, 30))
def test_few_characters_at_once_give_the_same_pairs(words, most):
    expected = pairs_by_hash(words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merges, "HASHED_AT_ONCE", most)
        found = pairs_by_hash(words)
    assert np.array_equal(np.stack(found), np.stack(expected))


@pytest.mark.parametrize("find", [pairs_by_hash, pairs_one_by_one])
def test_more_merges_than_a_vocabulary_has_are_refused(find, monkeypatch):
    monkeypatch.setattr(merges, "MOST_MERGES", 10)
    find(["a" * length for length in range(1, 6)])
    with pytest.raises(ValueError, match="in more than 10 ways"):
        find(["a" * length for length in range(1, 7)])


def test_what_only_seems_to_be_two_words_is_left_out(monkeypatch):
    monkeypatch.setattr(merges, "TABLE_BITS", 1)  # so that every part seems to be a word
    words = ["ab", "cd", "abcd", "xyz", "abx"]
    assert len(pairs_by_hash(words)[0]) > 1
    assert merges_of({word: index for index, word in enumerate(words)}, np.zeros(5)) == [("ab", "cd")]


def test_words_of_the_same_hash_are_found_one_by_one(monkeypatch):
    monkeypatch.setattr(merges, "BASE", 1)  # so that a hash is a sum of codes, whatever their order
    monkeypatch.setattr(merges, "INVERSE", 1)
    words = ["ab", "ba", "a", "b", "abba"]
    assert pairs_by_hash(words) is None
    expected = slowly_merged(words, np.zeros(5))
    assert merges_of({word: index for index, word in enumerate(words)}, np.zeros(5)) == expected


@pytest.mark.parametrize("length", [1 << 10, 1 << 11])
def test_words_made_to_have_the_same_hash_are_told_apart(length):
    """Thue and Morse's sequence and its opposite: modulo a power of two, their sums of powers are the same."""
    ones = [bin(place).count("1") % 2 for place in range(length)]
    word, other = ("".join("ab"[bit ^ flip] for bit in ones) for flip in (0, 1))
    words = [word, other, "a", word + "a", other + "a"]
    assert merges_of({w: index for index, w in enumerate(words)}, np.zeros(5)) == [(word, "a"), (other, "a")]


SCORES = st.integers(0, 2**20)
LETTERS = st.text("ab▁é🙂", max_size=12)


def scored(words, seed):
    scores = np.random.default_rng(seed).integers(-3, 0, len(words)).astype(np.float64)
    return {word: index for index, word in enumerate(words)}, scores


@every_level
@given(words=WORDS, seed=SCORES)
def test_used_merges_are_the_last_ones_of_each_piece_alone(kernels, words, seed):
    vocabulary, scores = scored(words, seed)
    expected = used_merges_one_by_one(vocabulary, scores)
    assert list(MergesById(used_merges_of(vocabulary, scores, kernels=kernels), words)) == expected


@given(words=st.lists(LETTERS.filter(bool), min_size=1, max_size=40, unique=True), seed=SCORES, texts=st.lists(LETTERS))
def test_texts_have_the_same_tokens_with_all_merges_and_with_used_ones(words, seed, texts):
    words = [*dict.fromkeys([*"ab▁é🙂", *words])]
    vocabulary, scores = scored(words, seed)
    both = [BPE(vocab=vocabulary, merges=find(vocabulary, scores)) for find in (merges_of, used_merges_one_by_one)]
    for text in [*texts, *words]:
        all_merges, used_merges = ([token.id for token in model.tokenize(text)] for model in both)
        assert all_merges == used_merges


@every_level
@pytest.mark.parametrize("words", [["a", "b", "ab", "abb", "bb"], ["a" * (LONGEST_WORD + 1), "a", "aa"]])
def test_pieces_that_come_about_without_merges_leave_all_merges(kernels, words):
    vocabulary, scores = scored(words, 0)
    found = used_merges_of(vocabulary, scores, kernels=kernels, given=["ab"])
    assert list(MergesById(found, words)) == merges_of(vocabulary, scores)
