"""Where the suffixes of a text occurred before, in a growing collection of texts.

Hash chains, as Lempel-Ziv compressors keep them: per gram size a table with the latest place of
every gram and, from each place, the distance back to the one before. A suffix tree's nodes are never
stored; `suffix_tree` grows the few that a draft needs from the places found here.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

GRAM_SIZES = (1, 3)
"""Lengths (tokens) of the grams that can be looked up, in rising order."""

BREAK = -1
"""A separator before, between and after texts; it equals no token, so no match and no continuation crosses it."""


class SuffixIndex:
    """Texts, oldest first, and for each gram the places behind its occurrences.

    `tokens` holds all texts one behind the other, with a `BREAK` before each. A *place* is an index
    into `tokens`: the gram ends before it, the continuation begins at it. A gram is added to the index
    when a token follows it, so the end of a text does not match itself.
    """

    def __init__(self, *, vocab_size: int) -> None:
        self.tokens = array("i", [BREAK])
        self.num_ended_texts = 0
        self._bits = vocab_size.bit_length()
        self._chains = [_Chain(size, self._bits) for size in GRAM_SIZES]
        self._text_start = 1
        self._packed_tail = 0
        self._first = 0  # tokens[:_first] are dropped, not yet freed
        self._num_freed = 0

    def __len__(self) -> int:
        """The number of tokens of the texts that are not dropped, breaks included."""
        return len(self.tokens) - self._first

    @property
    def text_length(self) -> int:
        """The number of tokens of the text that is growing."""
        return len(self.tokens) - self._text_start

    def extend(self, token_ids: Iterable[int]) -> None:
        """Add tokens to the text that is growing."""
        tokens, packed = self.tokens, self._packed_tail
        bits, mask = self._bits, self._chains[-1].mask
        length = self.text_length
        stamp = self._num_freed + len(tokens)
        for token_id in token_ids:
            for chain in self._chains:
                chain.append(packed, stamp, is_filed=length >= chain.size)
            tokens.append(token_id)
            packed = (packed << bits | token_id) & mask
            length += 1
            stamp += 1
        self._packed_tail = packed

    def end_text(self) -> None:
        """End the text that is growing and begin a new one."""
        self.tokens.append(BREAK)
        for chain in self._chains:
            chain.append(0, 0, is_filed=False)
        self._text_start = len(self.tokens)
        self.num_ended_texts += 1

    def drop_oldest_text(self) -> None:
        """Remove the oldest ended text, as if it had never been added."""
        end = self.tokens.index(BREAK, self._first + 1)
        packed = 0
        for place in range(self._first + 1, end):
            length = place - self._first - 1
            for chain in self._chains:
                if length >= chain.size:
                    chain.drop(packed, self._num_freed + place)
            packed = (packed << self._bits | self.tokens[place]) & self._chains[-1].mask
        self._first = end
        self.num_ended_texts -= 1
        if self._first > len(self):
            self._free_dropped()

    def places(self, suffix: list[int], *, limit: int) -> list[int]:
        """The latest places behind `suffix`, latest first and at most `limit`; its length is one of `GRAM_SIZES`."""
        packed = 0
        for token_id in suffix:
            packed = packed << self._bits | token_id
        chain = self._chains[GRAM_SIZES.index(len(suffix))]
        back = chain.back
        found: list[int] = []
        place = chain.latest.get(packed, 0) - self._num_freed
        while place > self._first and len(found) < limit:
            found.append(place)
            distance = back[place]
            if not distance:
                break
            place -= distance
        return found

    def _free_dropped(self) -> None:
        del self.tokens[: self._first]
        for chain in self._chains:
            del chain.back[: self._first]
        self._num_freed += self._first
        self._text_start -= self._first
        self._first = 0


class _Chain:
    """The places of all grams of one size.

    `latest[gram]` is the latest place plus the number of tokens freed so far, so that it stays valid when
    more are freed. `back[place]` is the distance to the previous place of the same gram, or 0.
    """

    __slots__ = ("back", "latest", "mask", "size")

    def __init__(self, size: int, bits: int) -> None:
        self.size = size
        self.mask = (1 << size * bits) - 1
        self.latest: dict[int, int] = {}
        self.back = array("I", [0])

    def append(self, packed_tail: int, stamp: int, *, is_filed: bool) -> None:
        """Append the next place; `is_filed` says whether a whole gram ends before it, under which it is filed."""
        if not is_filed:
            self.back.append(0)
            return
        gram = packed_tail & self.mask
        self.back.append(stamp - self.latest.get(gram, stamp))
        self.latest[gram] = stamp

    def drop(self, packed_tail: int, stamp: int) -> None:
        """Remove the oldest place; chains that led to it end before it."""
        gram = packed_tail & self.mask
        if self.latest[gram] == stamp:
            del self.latest[gram]
