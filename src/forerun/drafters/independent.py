"""Ways to write a draft from predictions for each depth that know none of the tokens drafted before them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from collections.abc import Sequence as Listing
from typing import NamedTuple, Protocol

from torch import Tensor

from forerun.core.draft import Draft
from forerun.drafters.base import DraftRequest
from forerun.drafters.choice import Bets, Choice, Spot
from forerun.drafters.growing_tree import GrowingTree
from forerun.drafters.tree import DynamicTree, StaticTree


class IndependentWriter(Protocol):
    """Writes the drafts of a step, all requests together."""

    depth: int  # how many predictions it can use

    def write(self, requests: Listing[DraftRequest], logits: Iterable[Tensor]) -> list[Draft]:
        """One draft per request; `logits[i]` [len(requests), V] predict the tokens at depth i + 1."""
        ...


class StaticWriter:
    """Drafts of one shape, a chain among them: rank r at a depth is the token that its prediction ranks so, whatever its parent."""

    def __init__(self, choice: Choice, shape: StaticTree) -> None:
        self.depth = shape.depth
        self._choice = choice
        self._num_children = {ranks: shape.num_children(ranks) for ranks in ((), *shape.paths)}

    def write(self, requests: Listing[DraftRequest], logits: Iterable[Tensor]) -> list[Draft]:
        """See `IndependentWriter`."""
        trees = [GrowingTree(request) for request in requests]
        levels: list[list[int]] = [[-1] for _ in trees]  # of each tree the nodes at the depth above
        for depth, predicted in enumerate(logits):
            asked = [
                (row, nodes, spot)
                for row, tree in enumerate(trees)
                if depth < tree.request.max_depth and len(tree.token_ids) < tree.request.max_tokens
                for nodes, spot in self._ask(tree, levels[row])
            ]
            if not asked:
                break
            levels = [[] for _ in trees]
            chosen = self._choice.choose(
                _select(predicted, [row for row, _, _ in asked]), [spot for _, _, spot in asked]
            )
            for (row, nodes, _), bets in zip(asked, chosen, strict=True):
                for node in nodes:
                    own = Bets(bets.token_ids[: self._count(trees[row], node)], bets.probs)
                    levels[row] += trees[row].add(node, own)
        return [tree.draft() for tree in trees]

    def _ask(self, tree: GrowingTree, level: list[int]) -> list[tuple[list[int], Spot]]:
        """Spots to bet on, each for the nodes that it is the same for: certain bets do not depend on the path."""
        nodes = [node for node in level if self._count(tree, node)]
        if nodes and self._choice.is_certain(tree.request):
            return [(nodes, tree.spot(nodes[0], count=max(self._count(tree, node) for node in nodes)))]
        return [([node], tree.spot(node, count=self._count(tree, node))) for node in nodes]

    def _count(self, tree: GrowingTree, node: int) -> int:
        """How many children a node shall have."""
        return self._num_children[tree.ranks_of(node)]


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

    def write(self, requests: Listing[DraftRequest], logits: Iterable[Tensor]) -> list[Draft]:
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
