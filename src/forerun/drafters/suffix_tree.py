"""A suffix tree over a growing collection of texts, of which only the nodes that a draft needs are ever made.

In its place are hash chains, as Lempel-Ziv compressors keep them: per gram size a table with the latest
place of every gram and, from each place, the distance back to the one before (`SuffixIndex`). The part of
the tree below a match is grown from the places found there (`grow`; SuffixDecoding, arXiv 2411.04975).
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from forerun.drafters.confidence import discount

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on the size of a tree and on the probability of its nodes."""

    max_nodes: int
    max_depth: int
    max_children: int  # per node, the most frequent ones; 1 makes a chain
    min_prob: float  # of the path from the root, by the shares of occurrences
    min_confidence: float  # of the same path, by discounted counts
    match_length: int

    @property
    def max_score(self) -> int:
        """The highest score that a tree can have: all nodes of one depth together add at most 1."""
        return min(self.max_nodes, self.max_depth)


@dataclass(frozen=True, slots=True)
class SpeculationTree:
    """Nodes in order of estimated probability; node i continues node `parents[i]`, -1 is the root.

    `score` is the sum of the nodes' path probabilities: the expected number of accepted tokens, if
    the estimates hold.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    score: float = 0.0


NO_TREE = SpeculationTree()


def grow(tokens: array[int], places: list[int], limits: Limits) -> SpeculationTree:
    """Build the tree of the likeliest continuations of a match.

    Args:
        tokens: texts, separated by `BREAK`.
        places: indices into `tokens` of what followed each occurrence of the match, latest first.
        limits: where to stop.

    The probability of a token after a path is its share among the tokens that followed the path's
    occurrences; that of a path is the product of its tokens'. The likeliest path known so far is taken
    next; of equally frequent tokens that with the latest occurrence. The confidence in a path is the
    same product over discounted counts.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    score = 0.0
    serial = 0  # the earlier of equally likely paths comes first
    frontier: list[tuple[float, int, float, int, int, int, list[int]]] = []
    prob, confidence, depth, parent = 1.0, 1.0, 0, -1
    while len(token_ids) < limits.max_nodes:
        if depth < limits.max_depth:
            seen_once = discount(limits.match_length + depth)
            for token_id, share, next_places in _children(tokens, places, limits.max_children):
                sure = confidence * share * (1.0 - seen_once / len(next_places))
                if prob * share >= limits.min_prob and sure >= limits.min_confidence:
                    heapq.heappush(frontier, (-prob * share, serial, sure, token_id, depth + 1, parent, next_places))
                    serial += 1
        if not frontier:
            break
        negative_prob, _, confidence, token_id, depth, node_parent, places = heapq.heappop(frontier)
        prob = -negative_prob
        parent = len(token_ids)
        token_ids.append(token_id)
        parents.append(node_parent)
        score += prob
    return SpeculationTree(tuple(token_ids), tuple(parents), score)


def _children(tokens: array[int], places: list[int], max_children: int) -> list[tuple[int, float, list[int]]]:
    """The most frequent tokens at `places`, each with its share of the places and the places behind it."""
    end = len(tokens)
    groups: dict[int, list[int]] = {}
    for place in places:
        if place < end and (token_id := tokens[place]) != BREAK:
            groups.setdefault(token_id, []).append(place + 1)
    total = sum(map(len, groups.values()))
    ranked = sorted(groups.items(), key=lambda group: -len(group[1]))
    return [(token_id, len(after) / total, after) for token_id, after in ranked[:max_children]]
