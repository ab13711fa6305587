"""Ways to write a draft from predictions for each depth that know none of the tokens drafted before them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from forerun.core.draft import Draft
from forerun.drafters.base import DraftRequest
from forerun.drafters.choice import Bets, Choice, Spot
from forerun.drafters.tree import DynamicTree, Ranks, StaticTree


class IndependentWriter(Protocol):
    """Writes the drafts of a step, all requests together."""

    depth: int  # how many predictions it can use

    def write(self, requests: Listing[DraftRequest], logits: Listing[Tensor]) -> list[Draft]:
        """One draft per request; `logits[i]` [len(requests), V] predict the tokens at depth i + 1."""
        ...


@dataclass(slots=True)
class _Tree:
    """A tree on its way: `nodes` numbers its nodes by their ranks, `num_asked` counts the bets asked for, which keys their noise."""

    request: DraftRequest
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)
    nodes: dict[Ranks, int] = field(default_factory=lambda: {(): -1})
    num_asked: int = 0

    def add(self, parent: Ranks, bets: Bets) -> None:
        """Continue a node; () is the text."""
        first = len(self.token_ids)
        self.token_ids += bets.token_ids
        self.parents += [self.nodes[parent]] * len(bets.token_ids)
        self.probs += bets.probs or []
        self.nodes |= {(*parent, rank): first + rank for rank in range(len(bets.token_ids))}

    def spot(self, parent: Ranks, *, count: int) -> Spot:
        tokens = tuple(self.token_ids[self.nodes[parent[: level + 1]]] for level in range(len(parent)))
        spot = Spot(self.request, tokens, count=count, index=self.num_asked)
        self.num_asked += count
        return spot


class StaticWriter:
    """Drafts of one shape, a chain among them: rank r at a depth is the token that its prediction ranks so, whatever its parent."""

    def __init__(self, choice: Choice, shape: StaticTree) -> None:
        self.depth = shape.depth
        self._choice = choice
        self._is_chain = shape.num_nodes == shape.depth
        self._levels: list[dict[Ranks, int]] = [{} for _ in range(shape.depth)]  # node -> number of children
        for path in ((), *shape.paths):
            if count := shape.num_children(path):
                self._levels[len(path)][path] = count

    def write(self, requests: Listing[DraftRequest], logits: Listing[Tensor]) -> list[Draft]:
        """See `IndependentWriter`."""
        trees = [_Tree(request) for request in requests]
        for depth, predicted in enumerate(logits):
            level = self._levels[depth]
            asked = [
                (row, paths, spot)
                for row, tree in enumerate(trees)
                if depth < tree.request.max_depth and len(tree.token_ids) < tree.request.max_tokens
                for paths, spot in self._ask(tree, level)
            ]
            if not asked:
                break
            chosen = self._choice.choose(
                _select(predicted, [row for row, _, _ in asked]), [spot for _, _, spot in asked]
            )
            for (row, paths, _), bets in zip(asked, chosen, strict=True):
                for path in paths:
                    trees[row].add(path, Bets(bets.token_ids[: level[path]], bets.probs))
        return [self._draft(tree) for tree in trees]

    def _ask(self, tree: _Tree, level: dict[Ranks, int]) -> list[tuple[list[Ranks], Spot]]:
        """Spots to bet on, each for the nodes that it is the same for: certain bets do not depend on the path."""
        paths = [path for path in level if path in tree.nodes]
        if paths and self._choice.is_certain(tree.request):
            return [(paths, tree.spot(paths[0], count=max(level[path] for path in paths)))]
        return [([path], tree.spot(path, count=level[path])) for path in paths]

    def _draft(self, tree: _Tree) -> Draft:
        probs = torch.stack(tree.probs) if tree.probs else None
        return Draft(tuple(tree.token_ids), None if self._is_chain else tuple(tree.parents), probs)


class _Candidate(NamedTuple):
    """A node that may be drafted next; `cost` is minus the log probability of its path, `cost_above` of its parent's."""

    cost: float
    parent: int
    depth: int
    rank: int
    cost_above: float


class BestFirstWriter:
    """The most probable paths, best first, of the `top_k` tokens at each depth: exact, as a path's probability is a product."""

    def __init__(self, shape: DynamicTree, *, target_ids: Tensor | None) -> None:
        self.depth = shape.depth
        self._top_k = shape.top_k
        self._target_ids = target_ids

    def write(self, requests: Listing[DraftRequest], logits: Listing[Tensor]) -> list[Draft]:
        """See `IndependentWriter`."""
        token_ids, costs = [], []
        for predicted in logits:
            found = predicted.topk(min(self._top_k, predicted.shape[1]))
            ids = found.indices if self._target_ids is None else self._target_ids[found.indices]
            token_ids.append(ids.tolist())
            costs.append((predicted.logsumexp(-1, keepdim=True) - found.values).tolist())
        return [
            _best_paths(request, [ids[row] for ids in token_ids], [own[row] for own in costs])
            for row, request in enumerate(requests)
        ]


def _best_paths(request: DraftRequest, token_ids: list[list[int]], costs: list[list[float]]) -> Draft:
    """A tree of the cheapest nodes, by the tokens at each depth and their costs, ascending.

    A node's next sibling and first child cost no less than itself, so they come up only after it has.
    """
    deepest = min(len(costs), request.max_depth)
    drafted: list[int] = []
    parents: list[int] = []
    heap = [_Candidate(costs[0][0], -1, 0, 0, 0.0)] if deepest else []
    while heap and len(drafted) < request.max_tokens:
        cost, parent, depth, rank, above = heapq.heappop(heap)
        if rank + 1 < len(costs[depth]):
            heapq.heappush(heap, _Candidate(above + costs[depth][rank + 1], parent, depth, rank + 1, above))
        if depth + 1 < deepest:
            heapq.heappush(heap, _Candidate(cost + costs[depth + 1][0], len(drafted), depth + 1, 0, cost))
        drafted.append(token_ids[depth][rank])
        parents.append(parent)
    return Draft(tuple(drafted), tuple(parents))


def _select(logits: Tensor, rows: list[int]) -> Tensor:
    """Rows of the logits, without a copy where that is all of them."""
    return logits if rows == list(range(len(logits))) else logits[rows]
