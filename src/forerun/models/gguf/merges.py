"""How BPE puts the pieces of a SentencePiece vocabulary together, which such a vocabulary does not say itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from forerun.ops.native.library import Kernels

Merges = list[tuple[str, str]]  # of pieces
MergedIds = np.ndarray  # [merges, 2] int32: the same as ids

BASE = 0x9E3779B97F4A7C15  # of powers modulo 2^64; any odd number with many bits
INVERSE = pow(BASE, -1, 1 << 64)
TABLE_BITS = 24  # of a hash: a hundred places for each word
LONGEST_WORD = 128  # characters; the time for a word grows with their square
HASHED_AT_ONCE = 1 << 18  # characters, whose hashes take a hundred bytes each
MOST_MERGES = 1 << 20  # Gemma 3's 262,144 pieces have half as many


def used_merges_of(
    vocabulary: dict[str, int], scores: np.ndarray, *, kernels: Kernels | None, given: Iterable[str] = ()
) -> MergedIds:
    """Return the ids of the merges of `merges_of` that BPE ever makes, in their order; all of them where that cannot be told.

    As long as no merge crosses the border of some characters, those between them are merged as they would be alone. So
    whatever text it is in, a piece comes about in one way: its last merge is the last one of that piece alone, and any other
    pair of the same characters is never merged. This halves the merges, the time that a tokenizer takes to build, and its
    memory. `given` are pieces that need not come about by merges, such as single bytes: where a piece begins or ends with
    one, or is very long, all pairs are returned.
    """
    words = list(vocabulary)
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    if kernels is None or lengths.max(initial=0) > LONGEST_WORD or _any_at_an_end(words, given):
        return ids_of(merges_of(vocabulary, scores), vocabulary)
    ids = np.fromiter(vocabulary.values(), np.int32, len(words))
    own_scores = np.ascontiguousarray(scores[ids], dtype=np.float64)
    codes = np.frombuffer("".join(words).encode("utf-32-le"), np.uint32)
    ends = np.cumsum(lengths)
    parts = np.empty((len(words), 2), np.int32)
    kernels.find_merges(codes.ctypes.data, ends.ctypes.data, own_scores.ctypes.data, len(words), parts.ctypes.data)
    (whole,) = np.nonzero(parts[:, 0] >= 0)
    first, second = parts[whole].T
    order = np.lexsort((-lengths[second], -lengths[first], -own_scores[whole]))
    return np.stack([ids[first[order]], ids[second[order]]], axis=1)


def ids_of(merges: Iterable[tuple[str, str]], vocabulary: dict[str, int]) -> MergedIds:
    """The ids of merges.

    Raises:
        KeyError: a piece is not in the vocabulary.
    """
    return np.array([vocabulary[piece] for merge in merges for piece in merge], dtype=np.int32).reshape(-1, 2)


class MergesById:
    """The merges of these ids [merges, 2], where `words` are the pieces by id: a sequence that makes each when it is asked for.

    A list of a large vocabulary's merges would take 16 MB beside what `tokenizers` makes of it.
    """

    def __init__(self, ids: MergedIds, words: Sequence[str]) -> None:
        self._ids, self._words = ids, words

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> tuple[str, str]:
        first, second = self._ids[index]
        return self._words[first], self._words[second]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        parts = (map(self._words.__getitem__, memoryview(part.copy())) for part in self._ids.T)
        return zip(*parts, strict=True)


def used_merges_one_by_one(vocabulary: dict[str, int], scores: np.ndarray) -> Merges:
    """The twin of `used_merges_of` in plain Python: merges each piece from its characters on, and keeps the last merge."""
    merges = merges_of(vocabulary, scores)
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    used: set[tuple[str, str]] = set()
    for word in vocabulary:
        parts, last = list(word), None
        while len(parts) > 1:
            pairs = list(zip(parts, parts[1:], strict=False))
            place = min(range(len(pairs)), key=lambda i: ranks.get(pairs[i], len(ranks)))
            if (last := pairs[place]) not in ranks:
                break
            parts[place : place + 2] = [last[0] + last[1]]
        else:
            used |= {last} if last else set()
    return [pair for pair in merges if pair in used]


def _any_at_an_end(words: Sequence[str], given: Iterable[str]) -> bool:
    """Whether a longer word begins or ends with one of the given."""
    names = tuple(given)
    first_characters = {name[0] for name in names}
    may = {word for character in first_characters for word in words if character in word}
    return any(word.startswith(names) or word.endswith(names) for word in may.difference(names))


def merges_of(vocabulary: dict[str, int], scores: np.ndarray) -> Merges:
    """Return all pairs of pieces that together are a piece, best score first.

    Of one score the pair with the longer first piece comes first, then the longer second one, then the lower id.

    Raises:
        ValueError: there are more than `MOST_MERGES`, which no vocabulary has that was trained.
    """
    words = list(vocabulary)
    found = pairs_by_hash(words)
    whole, first, second = pairs_one_by_one(words) if found is None else found
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    ids = np.fromiter(vocabulary.values(), np.int64, len(words))
    order = np.lexsort((-lengths[second], -lengths[first], -scores[ids[whole]]))
    chosen = (map(words.__getitem__, part[order].tolist()) for part in (whole, first, second))
    return [(begin, end) for word, begin, end in zip(*chosen, strict=True) if begin + end == word]


def pairs_one_by_one(words: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which words are two words put together: indices of the whole, of its first and of its second part, [n] int64 each.

    Raises:
        ValueError: see `merges_of`.
    """
    index_of = {word: index for index, word in enumerate(words)}
    found: list[tuple[int, int, int]] = []
    for word, index in index_of.items():
        parts = ((word[:end], word[end:]) for end in range(1, len(word)))
        found += [(index, index_of[a], index_of[b]) for a, b in parts if a in index_of and b in index_of]
        _check_count(len(found))
    whole, first, second = np.array(found, dtype=np.int64).reshape(-1, 3).T
    return whole, first, second


def pairs_by_hash(words: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """As `pairs_one_by_one`, all parts of many words at once, and perhaps a few that only seem to be such words.

    None: two words have the same hash.

    Raises:
        ValueError: see `merges_of`.
    """
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    none = np.zeros(0, np.uint64)  # where there are no words
    hashes = np.concatenate([none, *(_HashedWords(words[run], lengths[run]).whole for run in _runs(lengths))])
    by_hash = np.argsort(hashes)
    in_order = hashes[by_hash]
    if (in_order[1:] == in_order[:-1]).any():
        return None
    is_known = np.zeros(1 << TABLE_BITS, bool)
    is_known[_place(hashes)] = True
    found = [np.zeros((3, 0), np.int64)]
    for run in _runs(lengths):
        text = _HashedWords(words[run], lengths[run])
        whole, cut, *parts = text.cut_in_two(is_known)
        first, second = (by_hash[np.searchsorted(in_order, wanted).clip(max=len(words) - 1)] for wanted in parts)
        fits = lengths[first] == cut - text.starts[whole]  # else it is another word, since there is none of this hash
        found.append(np.stack([whole + run.start, first, second])[:, fits])
        _check_count(sum(pairs.shape[1] for pairs in found))
    whole, first, second = np.concatenate(found, axis=1)
    return whole, first, second


def _check_count(num_merges: int) -> None:
    if num_merges > MOST_MERGES:
        raise ValueError(f"its pieces are put together in more than {MOST_MERGES} ways")


def _runs(lengths: np.ndarray) -> Iterator[slice]:
    """Words of which each run has about `HASHED_AT_ONCE` characters, and at least one word."""
    ends, first = np.cumsum(lengths), 0
    while first < len(ends):
        most = ends[first] - lengths[first] + HASHED_AT_ONCE
        last = max(first + 1, int(np.searchsorted(ends, most, side="right")))
        yield slice(first, last)
        first = last


def _place(hashes: np.ndarray) -> np.ndarray:
    """Where hashes are in a table."""
    return hashes >> np.uint64(64 - TABLE_BITS)


class _HashedWords:
    """Hashes of any parts of some words: sums of their characters' codes times powers of a number, modulo 2^64.

    A part's sum is the difference of two prefixes' sums, divided by the power that it begins with.
    """

    def __init__(self, words: Sequence[str], lengths: np.ndarray) -> None:
        codes = np.frombuffer("".join(words).encode("utf-32-le"), np.uint32).astype(np.uint64)
        powers = np.cumprod(np.full(len(codes), BASE, np.uint64))
        self._sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum((codes + np.uint64(1)) * powers)])
        self._inverses = np.cumprod(np.full(len(codes) + 1, INVERSE, np.uint64)) * np.uint64(BASE)

        self._lengths = lengths
        self._ends = np.cumsum(lengths)
        self.starts = self._ends - lengths

    @property
    def whole(self) -> np.ndarray:
        """The hashes of the words: uint64."""
        return self._hashes(self.starts, self._ends)

    def cut_in_two(self, is_known: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """All ways to cut a word into two known parts: the index of the word, where it is cut, and both parts' hashes.

        `is_known` is a table of the places of hashes.
        """
        whole, cut = np.repeat(np.arange(len(self._ends)), self._lengths), np.arange(len(self._sums) - 1)
        inner = cut > self.starts[whole]
        whole, cut = whole[inner], cut[inner]
        first = self._hashes(self.starts[whole], cut)
        known = is_known[_place(first)]
        whole, cut, first = whole[known], cut[known], first[known]
        second = self._hashes(cut, self._ends[whole])
        known = is_known[_place(second)]
        return whole[known], cut[known], first[known], second[known]

    def _hashes(self, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Of the parts [begin, end): uint64."""
        found: np.ndarray = (self._sums[end] - self._sums[begin]) * self._inverses[begin]
        return found
