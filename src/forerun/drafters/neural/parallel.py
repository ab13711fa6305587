"""Drafts whose tokens are predicted all at once: no prediction knows the tokens drafted before it.

Medusa's heads predict so, and so does a network that reads masks in place of the tokens that it does
not know yet (PARD, arXiv 2504.18583; P-EAGLE, arXiv 2602.01469; DFlash, arXiv 2602.06036).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Listing
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from forerun.core.draft import NO_DRAFT, Draft
from forerun.drafters.base import DraftRequest, TargetInfo
from forerun.drafters.neural.forward import DraftSequence, ForwardPasses, QueryRows
from forerun.drafters.neural.sampling import DraftSampler, DraftSampling
from forerun.drafters.neural.tree import DraftedTokens, DraftPosition, DynamicTree, GrowingTree, StaticTree
from forerun.drafters.neural.writers import DraftNetwork
from forerun.errors import ConfigError
from forerun.models.base import MaskToken


class TreeBuilder(Protocol):
    """Builds the drafts of a step from one prediction per depth, those of all requests together."""

    depth: int  # the number of predictions that it can use

    def build(self, requests: Listing[DraftRequest], logits: Iterable[Tensor]) -> list[Draft]:
        """Build one draft per request; `logits[i]` [len(requests), V] predict the tokens at depth i + 1."""
        ...


def make_tree_builder(sampling: DraftSampling, target: TargetInfo, network: DraftNetwork) -> TreeBuilder:
    """Make the builder of the trees, or the chain, that `sampling` asks for.

    Raises:
        ConfigError: the tree has more nodes than a draft may have.
    """
    sampling.check_size(target.num_speculative_tokens)
    sampler = sampling.sampler(vocab_size=target.vocab_size, target_ids=network.target_ids)
    if isinstance(sampling.tree, DynamicTree):
        return DynamicTreeBuilder(sampler, sampling.tree)
    return StaticTreeBuilder(sampler, sampling.tree or StaticTree.chain(target.num_speculative_tokens))


class StaticTreeBuilder:
    """Builds drafts of one shape, chains too: the child of rank r is the token of rank r at its depth, whatever its parent."""

    def __init__(self, sampler: DraftSampler, shape: StaticTree) -> None:
        self.depth = shape.depth
        self.sampler = sampler
        self.shape = shape
        self._num_children = {ranks: shape.num_children(ranks) for ranks in ((), *shape.paths)}

    def build(self, requests: Listing[DraftRequest], logits: Iterable[Tensor]) -> list[Draft]:
        """See `TreeBuilder`."""
        trees = [GrowingTree(request) for request in requests]
        levels: list[list[int]] = [[-1] for _ in trees]  # of each tree the nodes at the depth above
        for depth, predicted in enumerate(logits):
            asked = [
                (row, nodes, position)
                for row, tree in enumerate(trees)
                if depth < tree.request.max_depth and len(tree.token_ids) < tree.request.max_tokens
                for nodes, position in self._positions(tree, levels[row])
            ]
            if not asked:
                break
            levels = [[] for _ in trees]
            drafted = self.sampler.sample(
                _select(predicted, [row for row, _, _ in asked]), [position for _, _, position in asked]
            )
            for (row, nodes, _), tokens in zip(asked, drafted, strict=True):
                for node in nodes:
                    own = DraftedTokens(tokens.token_ids[: self._count(trees[row], node)], tokens.probs)
                    levels[row] += trees[row].add(node, own)
        return [tree.draft() for tree in trees]

    def _positions(self, tree: GrowingTree, level: list[int]) -> list[tuple[list[int], DraftPosition]]:
        """The positions to draft for, each with the nodes that share its tokens: greedy tokens do not depend on the path."""
        nodes = [node for node in level if self._count(tree, node)]
        if nodes and self.sampler.is_greedy(tree.request):
            return [(nodes, tree.position(nodes[0], num_tokens=max(self._count(tree, node) for node in nodes)))]
        return [([node], tree.position(node, num_tokens=self._count(tree, node))) for node in nodes]

    def _count(self, tree: GrowingTree, node: int) -> int:
        """The number of children that a node gets."""
        return self._num_children[tree.ranks_of(node)]


class _Candidate(NamedTuple):
    """A node that may be drafted next; `cost` is minus the log probability of its path, `cost_above` of its parent's."""

    cost: float
    parent: int
    depth: int
    rank: int
    cost_above: float


class DynamicTreeBuilder:
    """Builds trees of the most probable paths of the `top_k` tokens at each depth.

    That is exact, as the probability of a path is the product of its tokens'.
    """

    def __init__(self, sampler: DraftSampler, shape: DynamicTree) -> None:
        self.depth = shape.depth
        self.sampler = sampler
        self.shape = shape

    def build(self, requests: Listing[DraftRequest], logits: Iterable[Tensor]) -> list[Draft]:
        """See `TreeBuilder`."""
        token_ids, costs = [], []
        for predicted in logits:
            found = predicted.topk(min(self.shape.top_k, predicted.shape[1]))
            token_ids.append(self.sampler.in_target(found.indices).tolist())
            costs.append((predicted.logsumexp(-1, keepdim=True) - found.values).tolist())
        return [
            best_paths(request, [ids[row] for ids in token_ids], [own[row] for own in costs])
            for row, request in enumerate(requests)
        ]


def best_paths(request: DraftRequest, token_ids: list[list[int]], costs: list[list[float]]) -> Draft:
    """A tree of the cheapest nodes, from the tokens at each depth and their costs, both in ascending order of cost.

    A node costs no more than its next sibling and its first child, so these become candidates after it. Of nodes that cost the
    same the one whose parent was drafted earlier comes first. None costs infinitely much.
    """
    deepest = min(len(costs), request.max_depth)
    drafted: list[int] = []
    parents: list[int] = []
    heap = [_Candidate(costs[0][0], -1, 0, 0, 0.0)] if deepest else []
    while heap and len(drafted) < request.max_tokens:
        cost, parent, depth, rank, above = heapq.heappop(heap)
        if cost == math.inf:
            break
        if rank + 1 < len(costs[depth]):
            heapq.heappush(heap, _Candidate(above + costs[depth][rank + 1], parent, depth, rank + 1, above))
        if depth + 1 < deepest:
            heapq.heappush(heap, _Candidate(cost + costs[depth + 1][0], len(drafted), depth + 1, 0, cost))
        drafted.append(token_ids[depth][rank])
        parents.append(parent)
    return Draft(tuple(drafted), tuple(parents))


def _select(logits: Tensor, rows: list[int]) -> Tensor:
    """Some rows of the logits, without a copy where that is all of them."""
    return logits if rows == list(range(len(logits))) else logits[rows]


class MaskWriter:
    """Writes a draft in one pass: the text's last token predicts the first depth, and each mask after it one more."""

    def __init__(self, builder: TreeBuilder, mask: MaskToken) -> None:
        self.num_places = builder.depth
        self.builder = builder
        self.mask = mask

    def write(
        self, passes: ForwardPasses, sequences: Listing[DraftSequence], hidden_states: Mapping[str, Tensor]
    ) -> list[Draft]:
        """See `Writer`."""
        rows = [self._masked(passes.read(sequence, hidden_states)) for sequence in sequences if sequence.wants_draft]
        return write_in_one_pass(self.builder, passes, sequences, rows)

    def _masked(self, rows: QueryRows) -> QueryRows:
        """Rows of unread text with the masks behind them."""
        num_predicted = draft_depth(rows.sequence, self.builder)
        states = rows.states
        if states is not None:
            assert self.mask.state is not None, "a network that reads states has one for masks"
            states = torch.cat([states, self.mask.state.expand(num_predicted - 1, -1)])
        token_ids = rows.token_ids + [self.mask.token_id] * (num_predicted - 1)
        return replace(rows, token_ids=token_ids, num_predicted=num_predicted, states=states)


def draft_depth(sequence: DraftSequence, builder: TreeBuilder) -> int:
    """The number of predictions that the draft of a sequence can use."""
    return min(sequence.max_tokens, sequence.max_depth, builder.depth)


def write_in_one_pass(
    builder: TreeBuilder, passes: ForwardPasses, sequences: Listing[DraftSequence], rows: Listing[QueryRows]
) -> list[Draft]:
    """Write a draft for each sequence; those that want one have `rows`, which predict it depth by depth."""
    if not rows:
        return [NO_DRAFT] * len(sequences)
    logits = passes.forward(rows).logits
    requests = [replace(own.sequence.request, max_depth=own.num_predicted) for own in rows]
    counts = np.array([own.num_predicted for own in rows])
    first = np.cumsum(counts) - counts
    deepest = int(counts.max())  # a sequence with fewer predictions repeats its last one, which goes unused
    by_depth = (logits[first + np.minimum(depth, counts - 1)] for depth in range(deepest))
    drafts = iter(builder.build(requests, by_depth))
    return [next(drafts) if sequence.wants_draft else NO_DRAFT for sequence in sequences]


def check_parallel_drafting(value: object) -> None:
    """Raise `ConfigError` unless `parallel_drafting` is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"parallel_drafting: got {value!r}; may be True or False")
