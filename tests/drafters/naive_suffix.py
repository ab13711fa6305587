"""Suffix decoding by its definition: count words in texts, try everything, take the best."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

Texts = Sequence[Sequence[int]]


class Speculation(NamedTuple):
    score: float
    match_length: int
    token_ids: tuple[int, ...]
    parents: tuple[int, ...]


NOTHING = Speculation(0.0, 0, (), ())


def followers(texts: Texts, word: tuple[int, ...]) -> list[int]:
    """The token after each occurrence of `word`, the latest occurrence first."""
    found = []
    for text in reversed(texts):
        for end in range(len(text) - 1, len(word) - 1, -1):
            if tuple(text[end - len(word) : end]) == word:
                found.append(text[end])
    return found


def children(texts: Texts, word: tuple[int, ...]) -> list[tuple[int, float]]:
    """Tokens after `word` and their shares, the most frequent first, then the one seen latest."""
    after = followers(texts, word)
    return sorted(((t, after.count(t) / len(after)) for t in dict.fromkeys(after)), key=lambda child: -child[1])


def confidence(texts: Texts, context: tuple[int, ...], path: tuple[int, ...]) -> float:
    """The product of the path's shares after `context`, each token's count discounted."""

    def discounted_share(depth: int) -> float:
        after = followers(texts, context + path[:depth])
        return (after.count(path[depth]) - 1 / (0.8 * (len(context) + depth) + 0.6)) / len(after)

    return prod(map(discounted_share, range(len(path))))


def speculate(
    texts: Texts,
    context: tuple[int, ...],
    *,
    max_nodes: int,
    max_depth: int,
    max_children: int,
    min_prob: float,
    threshold: float,
) -> Speculation:
    """Grow from `context`, always by the likeliest path not yet taken (the earliest found of equal ones)."""
    nodes: list[tuple[int, int]] = []
    score = 0.0
    paths: list[tuple[float, int, tuple[int, ...]]] = []  # probability, parent node, tokens from the root
    prob, parent, path = 1.0, -1, ()
    while len(nodes) < max_nodes:
        if len(path) < max_depth:
            found = [(prob * share, parent, (*path, t)) for t, share in children(texts, context + path)]
            likely = [one for one in found[:max_children] if one[0] >= min_prob]
            paths += [one for one in likely if confidence(texts, context, one[2]) >= threshold]
        if not paths:
            break
        chosen = max(range(len(paths)), key=lambda i: paths[i][0])  # the first of the largest
        prob, node_parent, path = paths.pop(chosen)
        parent = len(nodes)
        nodes.append((path[-1], node_parent))
        score += prob
    return Speculation(score, len(context), tuple(t for t, _ in nodes), tuple(p for _, p in nodes))


def candidates(
    text: Sequence[int],
    pool: Texts,
    *,
    depth: int,
    factor: float,
    min_prob: float,
    threshold: float,
    is_tree: bool,
    max_tokens: int,
    max_depth: int,
) -> list[Speculation]:
    """One speculation per collection of texts and match length, in order of preference among equals."""
    found = []
    for texts in ([text], pool):
        for length in range(min(depth - 1, len(text)), 0, -1):
            found.append(
                speculate(
                    texts,
                    tuple(text[len(text) - length :]),
                    max_nodes=int(min(max_tokens, factor * length)),
                    max_depth=min(max_depth, depth - length),
                    max_children=1000 if is_tree else 1,
                    min_prob=min_prob,
                    threshold=threshold,
                )
            )
    return found


def best(found: list[Speculation]) -> Speculation:
    """The highest score, then the longest match, then the first."""
    return max(found, key=lambda one: (one.score, one.match_length), default=NOTHING)
