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
    """Which words are two words put together: indices of the whole, of its first and of its second part, [n] int64 each."""
    index_of = {word: index for index, word in enumerate(words)}
    found = [
        (index, index_of[word[:end]], index_of[word[end:]])
        for word, index in index_of.items()
        for end in range(1, len(word))
        if word[:end] in index_of and word[end:] in index_of
    ]
    whole, first, second = np.array(found, dtype=np.int64).reshape(-1, 3).T
    return whole, first, second


def pairs_by_hash(words: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """As `pairs_one_by_one`, all parts of all words at once, and perhaps a few that only seem to be such words.

    None: two words have the same hash.
    """
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    ends = np.cumsum(lengths)
    starts = ends - lengths
    text = _HashedText("".join(words))
    hashes = text.hashes(starts, ends)
    by_hash = np.argsort(hashes)
    in_order = hashes[by_hash]
    if (in_order[1:] == in_order[:-1]).any():
        return None
    is_known = np.zeros(1 << TABLE_BITS, bool)
    is_known[_place(hashes)] = True

    whole, cut = np.repeat(np.arange(len(words)), lengths), np.arange(len(text))
    inner = cut > starts[whole]
    whole, cut = whole[inner], cut[inner]
    first = text.hashes(starts[whole], cut)
    known = is_known[_place(first)]
    whole, cut, first = whole[known], cut[known], first[known]
    second = text.hashes(cut, ends[whole])
    known = is_known[_place(second)]
    whole, cut = whole[known], cut[known]
    places = (np.searchsorted(in_order, wanted[known]).clip(max=len(words) - 1) for wanted in (first, second))
    first, second = (by_hash[place] for place in places)
    fits = lengths[first] == cut - starts[whole]  # else it is another word, since there is none of this hash
    return whole[fits], first[fits], second[fits]


def _place(hashes: np.ndarray) -> np.ndarray:
    """Where hashes are in a table."""
    return hashes >> np.uint64(64 - TABLE_BITS)


class _HashedText:
    """Hashes of any parts of a text: sums of their characters' codes times powers of a number, modulo 2^64.

    A part's sum is the difference of two prefixes' sums, divided by the power that it begins with.
    """

    def __init__(self, text: str) -> None:
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32).astype(np.uint64)
        powers = np.cumprod(np.full(len(codes), BASE, np.uint64))
        self._sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum((codes + np.uint64(1)) * powers)])
        self._inverses = np.cumprod(np.full(len(codes) + 1, INVERSE, np.uint64)) * np.uint64(BASE)

    def __len__(self) -> int:
        return len(self._sums) - 1

    def hashes(self, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Of the parts [begin, end): uint64."""
        found: np.ndarray = (self._sums[end] - self._sums[begin]) * self._inverses[begin]
        return found
