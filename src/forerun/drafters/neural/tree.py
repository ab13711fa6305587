"""Draft trees: the shapes that `draft_tree` can ask for, and a draft under construction."""

from __future__ import annotations

import math
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from forerun.core.draft import Draft
from forerun.core.integers import check_integer, is_integer
from forerun.drafters.base import DraftRequest
from forerun.errors import ConfigError, did_you_mean

Ranks = tuple[int, ...]
"""A node's path in a tree: the rank among siblings at each level from the root down; rank 0 is the likeliest token."""

MAX_NODES = 128


@dataclass(frozen=True, slots=True)
class StaticTree:
    """A tree with the same shape in every step: `paths` lists the nodes, parents before children."""

    paths: tuple[Ranks, ...]

    @classmethod
    def chain(cls, depth: int, num_runners_up: int = 0) -> StaticTree:
        """The likeliest token at each level, and beside it the next likeliest, which have no children."""
        ranks = range(1 + num_runners_up)
        return cls(tuple((*(0,) * above, rank) for above in range(depth) for rank in ranks))

    @property
    def num_nodes(self) -> int:
        """The number of draft tokens."""
        return len(self.paths)

    @property
    def depth(self) -> int:
        """The number of levels."""
        return max(map(len, self.paths))

    @property
    def num_places(self) -> int:
        """The number of KV places that drafting needs: one for each node that has children."""
        return len({path[:-1] for path in self.paths})

    @property
    def num_runners_up(self) -> int | None:
        """Where only the likeliest node of each level has children, and all levels are as wide: a level's other nodes."""
        widths = {self.num_children((0,) * depth) for depth in range(self.depth)}
        is_chain = all(not any(path[:-1]) for path in self.paths)
        return widths.pop() - 1 if is_chain and len(widths) == 1 else None

    def num_children(self, path: Ranks) -> int:
        """The number of children of the node at `path`; () is the root, the last committed token."""
        return sum(other[:-1] == path for other in self.paths)


@dataclass(frozen=True, slots=True)
class DynamicTree:
    """EAGLE-2's tree (arXiv 2406.16858): each level adds `top_k` children to each of the `top_k` most probable nodes.

    The draft holds the most probable nodes of all `depth` levels, at most as many as its request allows.
    """

    top_k: int
    depth: int

    @property
    def num_places(self) -> int:
        """The number of KV places that drafting needs."""
        return self.top_k * (self.depth - 1) + 1

    @property
    def num_candidates(self) -> int:
        """The number of nodes that a draft is chosen from, at most."""
        return self.top_k * self.num_places


def parse_tree(given: Any) -> StaticTree | DynamicTree | None:
    """Read `draft_tree`: None (a chain), branching by level [4, 2, 1], paths [[0], [1], [0, 0]], or {"top_k": 8, "depth": 5}.

    Raises:
        ConfigError: the value is none of these, a path lacks its parent or a likelier sibling, or there are too many nodes.
    """
    if given is None:
        return None
    if isinstance(given, dict):
        return _dynamic(given)
    if not isinstance(given, (list, tuple)) or not given:
        raise ConfigError(
            f"draft_tree: got {given!r}; may be branching by level such as [4, 2, 1], paths such as [[0], [1], [0, 0]], "
            "or {'top_k': 8, 'depth': 5}"
        )
    if all(is_integer(item) for item in given):
        return _by_level(given)
    return _by_paths(given)


def _dynamic(given: dict[str, Any]) -> DynamicTree:
    for key in given:
        if key not in ("top_k", "depth"):
            raise ConfigError(f"draft_tree: unknown key {key!r}{did_you_mean(str(key), ('top_k', 'depth'))}")
    for key in ("top_k", "depth"):
        check_integer(f"draft_tree: {key}", given.get(key), least=1, most=MAX_NODES, do="e.g. 8 and 5")
    return DynamicTree(**given)


def _by_level(counts: Listing[int]) -> StaticTree:
    """The tree in which each node of level i has counts[i] children."""
    paths: list[Ranks] = []
    level: list[Ranks] = [()]
    for count in counts:
        if count < 1:
            raise ConfigError(f"draft_tree: got {list(counts)}; each level must branch at least once")
        level = [(*path, rank) for path in level for rank in range(count)]
        paths += level
        _check_size(len(paths))
    return StaticTree(tuple(paths))


def _by_paths(given: Listing[Any]) -> StaticTree:
    paths: set[Ranks] = set()
    for path in given:
        if not isinstance(path, (list, tuple)) or not path or not all(is_integer(rank) and rank >= 0 for rank in path):
            raise ConfigError(
                f"draft_tree: got {path!r} among the paths; each must be a list of ranks from 0, as [0, 1]"
            )
        if tuple(path) in paths:
            raise ConfigError(f"draft_tree: path {list(path)} is given twice; give each once")
        paths.add(tuple(path))
    _check_size(len(paths))
    for path in sorted(paths):
        if path[:-1] and path[:-1] not in paths:
            raise ConfigError(f"draft_tree: path {list(path)} lacks its parent {list(path[:-1])}; add it")
        likelier = (*path[:-1], path[-1] - 1)
        if path[-1] and likelier not in paths:
            raise ConfigError(f"draft_tree: path {list(path)} lacks the likelier {list(likelier)}; add it")
    return StaticTree(tuple(sorted(paths, key=lambda path: (len(path), path))))


def _check_size(num_nodes: int) -> None:
    if num_nodes > MAX_NODES:
        raise ConfigError(f"draft_tree: has more than {MAX_NODES} nodes; leave some out")


@dataclass(frozen=True, slots=True)
class DraftPosition:
    """A position to draft `num_tokens` alternatives for: after the text of `request` and the drafted tokens `path`.

    `noise_index` numbers the first of these tokens among all that were asked for in the draft; it keys
    their sampling noise.
    """

    request: DraftRequest
    path: tuple[int, ...]
    num_tokens: int
    noise_index: int


@dataclass(frozen=True, slots=True)
class DraftedTokens:
    """The tokens drafted for one position, the likeliest or first drawn first.

    `probs[i]` [vocab_size] is the distribution that token i was drawn from, given the tokens before it;
    `probs` is None where the tokens were not drawn. `margin` says how far the first is ahead of the second: in logits
    where they are the likeliest, in scores where they are the first of a race, infinite where there is no second; NaN: it
    is not known.
    """

    token_ids: list[int]
    probs: list[Tensor] | None = None
    margin: float = math.nan

    def first(self, count: int) -> DraftedTokens:
        """The first `count` of tokens that were not drawn."""
        return DraftedTokens(self.token_ids[:count], margin=self.margin)


@dataclass(slots=True)
class GrowingTree:
    """A draft tree under construction: node i holds `token_ids[i]` and continues node `parents[i]`, -1 is the root.

    `ranks[i]` is the path of node i. `num_asked` counts the tokens asked for, which keys their noise.
    """

    request: DraftRequest
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    ranks: list[Ranks] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)
    num_asked: int = 0

    def position(self, node: int, *, num_tokens: int) -> DraftPosition:
        """The position after a node, to draft `num_tokens` children for."""
        path = tuple(self.token_ids[above] for above in self.path(node))
        position = DraftPosition(self.request, path, num_tokens, self.num_asked)
        self.num_asked += num_tokens
        return position

    def add(self, parent: int, drafted: DraftedTokens) -> range:
        """Add children to a node; return the new nodes."""
        first, above = len(self.token_ids), self.ranks_of(parent)
        self.token_ids += drafted.token_ids
        self.parents += [parent] * len(drafted.token_ids)
        self.ranks += [(*above, rank) for rank in range(len(drafted.token_ids))]
        self.probs += drafted.probs or []
        return range(first, len(self.token_ids))

    def ranks_of(self, node: int) -> Ranks:
        """The path of a node in ranks; () for the root."""
        return self.ranks[node] if node >= 0 else ()

    def path(self, node: int) -> list[int]:
        """The nodes from the first level down to `node`, inclusive; none for the root."""
        nodes: list[int] = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def draft(self) -> Draft:
        """The tree so far as a draft; without parents where it is a chain."""
        is_chain = self.parents == list(range(-1, len(self.parents) - 1))
        probs = torch.stack(self.probs) if self.probs else None
        return Draft(tuple(self.token_ids), None if is_chain else tuple(self.parents), probs)
