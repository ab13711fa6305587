"""A draft tree on its way."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun.core.draft import Draft
from forerun.drafters.base import DraftRequest
from forerun.drafters.choice import Bets, Spot
from forerun.drafters.tree import Ranks


@dataclass(slots=True)
class GrowingTree:
    """Node i holds `token_ids[i]` after node `parents[i]`; -1 is the text. `ranks[i]` are the ranks among siblings on its path.

    `num_asked` counts the bets asked for, which keys their noise.
    """

    request: DraftRequest
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    ranks: list[Ranks] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)
    num_asked: int = 0

    def spot(self, node: int, *, count: int) -> Spot:
        """Where to bet on `count` tokens that continue a node."""
        spot = Spot(self.request, tuple(self.token_ids[above] for above in self.path(node)), count, self.num_asked)
        self.num_asked += count
        return spot

    def add(self, parent: int, bets: Bets) -> range:
        """Continue a node; the new nodes."""
        first, above = len(self.token_ids), self.ranks_of(parent)
        self.token_ids += bets.token_ids
        self.parents += [parent] * len(bets.token_ids)
        self.ranks += [(*above, rank) for rank in range(len(bets.token_ids))]
        self.probs += bets.probs or []
        return range(first, len(self.token_ids))

    def ranks_of(self, node: int) -> Ranks:
        """() for the text."""
        return self.ranks[node] if node >= 0 else ()

    def path(self, node: int) -> list[int]:
        """Nodes from the root down to `node`, inclusive; none for the text."""
        nodes: list[int] = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def draft(self) -> Draft:
        """What has grown."""
        is_chain = self.parents == list(range(-1, len(self.parents) - 1))
        probs = torch.stack(self.probs) if self.probs else None
        return Draft(tuple(self.token_ids), None if is_chain else tuple(self.parents), probs)
