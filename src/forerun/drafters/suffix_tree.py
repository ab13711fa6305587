"""The part of a suffix tree below a match, grown on demand (SuffixDecoding, arXiv 2411.04975)."""

from __future__ import annotations

import heapq
from array import array
from dataclasses import dataclass

from forerun.drafters.confidence import discount
from forerun.drafters.suffix_index import BREAK


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
