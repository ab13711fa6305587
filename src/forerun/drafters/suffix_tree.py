"""A suffix tree over a growing collection of texts, of which only the nodes that a draft needs are ever made.

In its place are hash chains, as Lempel-Ziv compressors keep them: per gram size a table with the latest
place of the grams of each slot and, from each place, the distance back to the one before (`SuffixIndex`).
The part of the tree below a match is grown from the places found there (`grow`; SuffixDecoding, arXiv
2411.04975).
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from sys import getsizeof

import numpy as np

from forerun.drafters.confidence import discount

GRAM_SIZES = (1, 3)
"""Lengths (tokens) of the grams that can be looked up, in rising order."""

BREAK = -1
"""A separator before, between and after texts; it equals no token, so no match and no continuation crosses it."""

FEWEST_SLOTS = 64
MOST_PROBES = 2048
"""Places of a slot that a look-up visits; more only where other grams share the slot of a rare one."""

FREED_SHARE = 1 / 4
"""Dropped texts are freed when they are this part of those that are left, so that each token is moved a few times at most."""

SCATTERING = 0x9E3779B97F4A7C15  # 2^64 / golden ratio (Fibonacci hashing; Knuth, volume 3, 6.4)


class SuffixIndex:
    """Texts, oldest first, and for each gram the places behind its occurrences.

    `tokens` holds all texts one behind the other, with a `BREAK` before each. A *place* is an index
    into `tokens`: the gram ends before it, the continuation begins at it. A gram is added to the index
    when a token follows it, so the end of a text does not match itself.

    All lies in flat arrays: 12 bytes a token, and per gram size a table of as many slots as there are
    tokens, rounded up to a power of two. Different grams may share a slot, so whoever follows its chain
    compares tokens; and when a table doubles, both halves simply begin with the chains there are.
    """

    def __init__(self, *, vocab_size: int) -> None:
        self.tokens = array("i", [BREAK])
        self.num_ended_texts = 0
        self._bits = vocab_size.bit_length()
        self._most_singles = 1 << self._bits
        self._singles, self._triples = _Chains(), _Chains()
        self._text_start = 1
        self._packed_tail = 0  # the last three tokens of the growing text
        self._first = 0  # tokens[:_first] are dropped, not yet freed

    def __len__(self) -> int:
        """The number of tokens of the texts that are not dropped, breaks included."""
        return len(self.tokens) - self._first

    @property
    def text_length(self) -> int:
        """The number of tokens of the text that is growing."""
        return len(self.tokens) - self._text_start

    @property
    def num_bytes(self) -> int:
        """The memory of the arrays."""
        return getsizeof(self.tokens) + self._singles.num_bytes + self._triples.num_bytes

    def most_bytes_with(self, num_tokens: int) -> int:
        """The most memory that the arrays may take once so many tokens more are in, and a break."""
        length = len(self.tokens) + num_tokens + 1
        needed = length * 17 // 16 * 4 + 200  # Python's arrays take a sixteenth more than they need
        arrays = (self.tokens, self._singles.back, self._triples.back)
        slots = (self._singles.latest, self._triples.latest)
        return sum(max(getsizeof(array), needed) for array in arrays) + sum(
            max(getsizeof(latest), 4 * num_slots + 200)
            for latest, num_slots in zip(slots, self._slots_for(length), strict=True)
        )

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens to the text that is growing."""
        tokens, singles, triples = self.tokens, self._singles, self._triples
        place = len(tokens)
        singles_slots, triples_slots = self._slots_for(place + len(token_ids))
        singles.grow(singles_slots)
        triples.grow(triples_slots)
        latest_single, back_single = singles.latest, singles.back
        latest_triple, back_triple = triples.latest, triples.back
        singles_mask, triples_mask = (singles_slots - 1) & ((1 << self._bits) - 1), triples_slots - 1
        packed, bits, mask = self._packed_tail, self._bits, (1 << 3 * self._bits) - 1
        for token_id in token_ids:
            slot = packed & singles_mask
            before = latest_single[slot]
            back_single.append(place - before if before else 0)
            latest_single[slot] = place
            slot = packed * SCATTERING >> 32 & triples_mask
            before = latest_triple[slot]
            back_triple.append(place - before if before else 0)
            latest_triple[slot] = place
            tokens.append(token_id)
            packed = (packed << bits | token_id) & mask
            place += 1
        self._packed_tail = packed

    def end_text(self) -> None:
        """End the text that is growing and begin a new one."""
        self.tokens.append(BREAK)
        self._singles.back.append(0)
        self._triples.back.append(0)
        self._packed_tail = 0
        self._text_start = len(self.tokens)
        self.num_ended_texts += 1

    def drop_oldest_text(self) -> None:
        """Remove the oldest ended text, as if it had never been added."""
        self._first = self.tokens.index(BREAK, self._first + 1)
        self.num_ended_texts -= 1
        if self._first > len(self) * FREED_SHARE:
            self._free_dropped()

    def ended_texts(self) -> array[int]:
        """The tokens of all ended texts, oldest first, each with a `BREAK` behind it."""
        return self.tokens[self._first + 1 : self._text_start]

    def places(self, suffix: Sequence[int], *, limit: int) -> list[int]:
        """The latest places behind `suffix`, latest first and at most `limit`; its length is one of `GRAM_SIZES`."""
        is_single = len(suffix) == 1
        chains = self._singles if is_single else self._triples
        packed = 0
        for token_id in suffix:
            packed = packed << self._bits | token_id
        slot = (packed if is_single else packed * SCATTERING >> 32) & len(chains.latest) - 1
        tokens, back, first = self.tokens, chains.back, self._first
        last, before_last, third_last = suffix[-1], suffix[-2 % len(suffix)], suffix[-3 % len(suffix)]
        found: list[int] = []
        place = chains.latest[slot]
        for _ in range(MOST_PROBES):
            if place <= first or len(found) >= limit:
                break
            # nearest token first: at the beginning of a text a break ends the comparison
            if tokens[place - 1] == last and (
                is_single or (tokens[place - 2] == before_last and tokens[place - 3] == third_last)
            ):
                found.append(place)
            distance = back[place]
            if not distance:
                break
            place -= distance
        return found

    def _slots_for(self, num_tokens: int) -> tuple[int, int]:
        """The slots of both tables for so many tokens; they never become fewer."""
        wanted = max(FEWEST_SLOTS, 1 << (num_tokens - 1).bit_length())
        singles = max(len(self._singles.latest), min(wanted, self._most_singles))
        return singles, max(len(self._triples.latest), wanted)

    def _free_dropped(self) -> None:
        del self.tokens[: self._first]
        self._singles.free(self._first)
        self._triples.free(self._first)
        self._text_start -= self._first
        self._first = 0


class _Chains:
    """The places of all grams of one size, in a chain for each slot.

    `latest[slot]` is the latest place whose gram has this slot, 0 for none. `back[place]` is the distance
    to the previous place of the same slot, or 0.
    """

    __slots__ = ("back", "latest")

    def __init__(self) -> None:
        self.latest = array("I", bytes(4 * FEWEST_SLOTS))
        self.back = array("I", [0])

    @property
    def num_bytes(self) -> int:
        """The memory of both arrays."""
        return getsizeof(self.latest) + getsizeof(self.back)

    def grow(self, num_slots: int) -> None:
        """Double the slots until there are `num_slots`; a gram's slot then has one bit more."""
        while len(self.latest) < num_slots:
            self.latest = self.latest * 2  # not in place, which would take a sixteenth more than it needs

    def free(self, num_places: int) -> None:
        """Forget the first places."""
        del self.back[:num_places]
        latest = np.frombuffer(self.latest, np.uint32)
        np.maximum(latest, num_places, out=latest)
        latest -= num_places


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
