"""A draft: the tokens that a drafter proposes, as a chain or a tree; it may be empty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

SLACK = 0.5
"""Nodes with this share of the chance that the last verified row needed are drafted too: the next step may have room for them."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens after a sequence's last committed token.

    Node i holds `token_ids[i]` and continues node `parents[i]`; -1 is the last committed token.
    A parent comes before its children, so every prefix of a draft is a draft. `parents=None` means
    a chain. `probs` ([num_nodes, vocab_size], fp32) holds in row i the distribution that node i was
    drawn from, given its parents and its earlier siblings; None means that each token had probability 1.
    `source` names the drafter where several take turns, and `sources` that of each node where several drafted one draft, whose
    first node is `source`'s. `survival` holds for each node the drafter's
    estimate of the chance that it stands, its whole path from the root included; nodes then come in
    falling order of it, so that every prefix is the best draft of its size. None: the drafter does not
    know. `margins` say how far each token of `first_path` is ahead of its first runner-up, in logits or in scores of
    the target's race: NaN where the drafter does not know, infinite where there is no runner-up (`drafters.margins`). A draft of
    length zero is plain decoding.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None
    probs: Tensor | None = None
    source: str | None = None
    survival: tuple[float, ...] | None = None
    margins: tuple[float, ...] | None = None
    sources: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        """Whether node i continues node i - 1, for every i."""
        return self.parents is None or self.parents == tuple(range(-1, len(self.parents) - 1))

    def parent(self, node: int) -> int:
        """The node that `node` continues; -1 is the last committed token."""
        return node - 1 if self.parents is None else self.parents[node]

    def is_leaf(self, node: int) -> bool:
        """Whether no node continues `node` (-1: whether the draft is empty)."""
        return node == len(self.token_ids) - 1 if self.parents is None else node not in self.parents

    def child(self, node: int, token_id: int) -> int:
        """The first node that continues `node` (-1: the root) with a token; -1 where there is none."""
        token_ids, parents = self.token_ids, self.parents
        if parents is None:
            return node + 1 if node + 1 < len(token_ids) and token_ids[node + 1] == token_id else -1
        for child in range(node + 1, len(token_ids)):
            if token_ids[child] == token_id and parents[child] == node:
                return child
        return -1

    def children(self) -> list[list[int]]:
        """Children of each place, in draft order: index 0 is the root (-1), index i + 1 is node i."""
        size = len(self.token_ids)
        found: list[list[int]] = [[] for _ in range(size + 1)]
        for node, parent in enumerate(range(-1, size - 1) if self.parents is None else self.parents):
            found[parent + 1].append(node)
        return found

    def depths(self) -> list[int]:
        """Distance of each node from the last committed token; its children are at depth 1."""
        if self.parents is None:
            return list(range(1, len(self.token_ids) + 1))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    @property
    def depth(self) -> int:
        """Depth of the deepest node; 0 for an empty draft."""
        if self.parents is None or not self.token_ids:
            return len(self.token_ids)
        return max(self.depths())

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child down to `node`, inclusive; empty for -1."""
        nodes: list[int] = []
        while node >= 0:
            nodes.append(node)
            node = self.parent(node)
        return nodes[::-1]

    def num_stood(self, text: Sequence[int]) -> int:
        """How many tokens of a text follow a path of the draft, from its first on."""
        node = -1
        for num_stood, token_id in enumerate(text):
            node = self.child(node, token_id)
            if node < 0:
                return num_stood
        return len(text)

    def source_of(self, node: int) -> str | None:
        """The drafter of a node, where it is known."""
        return self.source if self.sources is None else self.sources[node]

    def num_drafted_by(self) -> dict[str, int]:
        """The nodes of each drafter; none where the drafters are not known."""
        if self.sources is not None:
            return {source: self.sources.count(source) for source in dict.fromkeys(self.sources)}
        return {self.source: len(self.token_ids)} if self.source is not None and self.token_ids else {}

    def first_path(self) -> list[list[int]]:
        """The tokens at each depth of the path of first children: the path's own, and after it its siblings."""
        if self.parents is None:
            return [[token_id] for token_id in self.token_ids]
        children, levels = self.children(), list[list[int]]()
        nodes = children[0]
        while nodes:
            levels.append([self.token_ids[node] for node in nodes])
            nodes = children[nodes[0] + 1]
        return levels

    def first(self, num_nodes: int) -> Draft:
        """The draft made of the first `num_nodes` nodes."""
        if num_nodes >= len(self.token_ids):
            return self
        if not num_nodes:
            return NO_DRAFT
        return Draft(
            self.token_ids[:num_nodes],
            None if self.parents is None else self.parents[:num_nodes],
            None if self.probs is None else self.probs[:num_nodes],
            self.source,
            None if self.survival is None else self.survival[:num_nodes],
            self.margins,
            None if self.sources is None else self.sources[:num_nodes],
        )

    def only(self, nodes: Sequence[int]) -> Draft:
        """The draft made of `nodes`, in rising order; the parent of each must be among them."""
        if len(nodes) == len(self):
            return self
        if not nodes:
            return NO_DRAFT
        if self.parents is None:
            return self.first(len(nodes))
        place = {node: i for i, node in enumerate(nodes)} | {-1: -1}
        return Draft(
            tuple(self.token_ids[node] for node in nodes),
            tuple(place[self.parents[node]] for node in nodes),
            None if self.probs is None else self.probs[list(nodes)],
            self.source,
            None if self.survival is None else tuple(self.survival[node] for node in nodes),
            self.margins,
            None if self.sources is None else tuple(self.sources[node] for node in nodes),
        )


NO_DRAFT = Draft()
