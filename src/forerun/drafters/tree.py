"""Shapes of drafts: a chain, a fixed tree, or one that grows where the drafter is confident."""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import Any

from forerun.errors import ConfigError, did_you_mean

Ranks = tuple[int, ...]
"""A node of a tree: its rank among its siblings, at each level from the root down."""

MOST_NODES = 128


@dataclass(frozen=True, slots=True)
class StaticTree:
    """A tree of given nodes: `paths` tell each node's ranks from the root down, parents before children.

    Rank 0 is the likeliest token at its place.
    """

    paths: tuple[Ranks, ...]

    @classmethod
    def chain(cls, num_nodes: int) -> StaticTree:
        """The likeliest token at each level."""
        return cls(tuple((0,) * depth for depth in range(1, num_nodes + 1)))

    @property
    def num_nodes(self) -> int:
        """Nodes of the draft."""
        return len(self.paths)

    @property
    def depth(self) -> int:
        """Levels of the tree."""
        return max(map(len, self.paths))

    @property
    def num_places(self) -> int:
        """KV places that drafting takes: one for each node that is continued."""
        return len({path[:-1] for path in self.paths})

    def num_children(self, path: Ranks) -> int:
        """How many nodes continue the one at `path`; () is the last committed token."""
        return sum(other[:-1] == path for other in self.paths)


@dataclass(frozen=True, slots=True)
class DynamicTree:
    """EAGLE-2's tree (arXiv 2406.16858): each level continues the `top_k` most probable paths by `top_k` tokens each.

    Of all candidates, `depth` levels deep, the most probable ones are drafted, as many as may be.
    """

    top_k: int
    depth: int

    @property
    def num_places(self) -> int:
        """KV places that drafting takes."""
        return self.top_k * (self.depth - 1) + 1


def parse_tree(given: Any) -> StaticTree | DynamicTree | None:
    """Read `draft_tree`: None (a chain), branching by level [4, 2, 1], paths [[0], [1], [0, 0]], or {"top_k": 8, "depth": 5}.

    Raises:
        ConfigError: it is none of these, a path lacks its parent or an elder sibling, or there are too many nodes.
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
    if all(_is_count(item) for item in given):
        return _by_level(given)
    return _by_paths(given)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _dynamic(given: dict[str, Any]) -> DynamicTree:
    for key in given:
        if key not in ("top_k", "depth"):
            raise ConfigError(f"draft_tree: unknown key {key!r}{did_you_mean(str(key), ('top_k', 'depth'))}")
    for key in ("top_k", "depth"):
        value = given.get(key, 0)
        if not _is_count(value) or not 1 <= value <= MOST_NODES:
            raise ConfigError(
                f"draft_tree: {key}: got {given.get(key)!r}; must be an integer from 1 to {MOST_NODES}; e.g. 8 and 5"
            )
    return DynamicTree(**given)


def _by_level(counts: Listing[int]) -> StaticTree:
    """Each node of level i has counts[i] children."""
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
        if not isinstance(path, (list, tuple)) or not path or not all(_is_count(rank) and rank >= 0 for rank in path):
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
        elder = (*path[:-1], path[-1] - 1)
        if path[-1] and elder not in paths:
            raise ConfigError(f"draft_tree: path {list(path)} lacks the likelier {list(elder)}; add it")
    return StaticTree(tuple(sorted(paths, key=lambda path: (len(path), path))))


def _check_size(num_nodes: int) -> None:
    if num_nodes > MOST_NODES:
        raise ConfigError(f"draft_tree: has more than {MOST_NODES} nodes; leave some out")
