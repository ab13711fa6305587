"""Ways to write a draft with a predictor in passes of their own: token by token, or as a tree level by level."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from forerun.core.draft import Draft
from forerun.drafters.choice import Bets, Choice, Spot
from forerun.drafters.growing_tree import GrowingTree
from forerun.drafters.passes import Line, Rows
from forerun.drafters.predictor import Prediction
from forerun.drafters.tree import DynamicTree, StaticTree


class ForwardPasses(Protocol):
    """What a writer asks for its words: `passes.Passes`, or passes of a network without KV."""

    def read(self, line: Line, features: Mapping[str, Tensor]) -> Rows:
        """The rows of what has not been read yet of a line's text."""
        ...

    def forward(self, listed: Listing[Rows]) -> Prediction:
        """Compute all rows; predictions at the wanted rows of each, one line after the other."""
        ...


class Writer(Protocol):
    """Writes the drafts of a step, all lines together."""

    num_places: int  # KV places beyond the text that a draft takes

    def write(self, passes: ForwardPasses, lines: Listing[Line], features: Mapping[str, Tensor]) -> list[Draft]:
        """One draft per line; of a line that wants no tokens nothing is read either."""
        ...


@dataclass(slots=True)
class _Chain:
    line: Line
    token_ids: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)

    def spot(self) -> Spot:
        return Spot(self.line.request, tuple(self.token_ids), count=1, index=len(self.token_ids))

    def grow(self, bets: Bets) -> bool:
        """Append the bet; False: there was none, or no more is wanted."""
        self.token_ids += bets.token_ids
        self.probs += bets.probs or []
        return bool(bets.token_ids) and len(self.token_ids) < min(self.line.max_tokens, self.line.max_depth)

    def rows(self, state: Tensor | None) -> Rows:
        """The last token, to be read with `state` [width]."""
        start = self.line.end + len(self.token_ids) - 1
        states = None if state is None else state[None]
        return Rows(line=self.line, token_ids=self.token_ids[-1:], start=start, num_wanted=1, states=states)

    def draft(self) -> Draft:
        return Draft(tuple(self.token_ids), None, torch.stack(self.probs) if self.probs else None)


class ChainWriter:
    """One token after the other, one forward pass each."""

    def __init__(self, choice: Choice, *, num_tokens: int) -> None:
        self.num_places = num_tokens
        self._choice = choice

    def write(self, passes: ForwardPasses, lines: Listing[Line], features: Mapping[str, Tensor]) -> list[Draft]:
        """See `Writer`."""
        chains = [_Chain(line) for line in lines]
        growing = [chain for chain in chains if chain.line.is_wanted]
        rows = [passes.read(chain.line, features) for chain in growing]
        while growing:
            prediction = passes.forward(rows)
            bets = self._choice.choose(prediction.logits, [chain.spot() for chain in growing])
            states = [None] * len(growing) if prediction.states is None else prediction.states
            grown = [(chain, state) for chain, bet, state in zip(growing, bets, states, strict=True) if chain.grow(bet)]
            growing = [chain for chain, _ in grown]
            rows = [chain.rows(state) for chain, state in grown]
        return [chain.draft() for chain in chains]


@dataclass(slots=True, kw_only=True)
class _Tree(GrowingTree):
    """A tree whose nodes are read: `columns` tell in which order.

    `scores[i]`, where they are kept, is the log probability of node i's path.
    """

    line: Line
    scores: list[float] = field(default_factory=list)
    columns: dict[int, int] = field(default_factory=dict)

    def rows(self, nodes: Listing[int], states: Tensor | None) -> Rows:
        """Nodes to be read, each with its row of `states` [len(nodes), width]; their ancestors have been."""
        first = len(self.columns)
        self.columns |= {node: first + i for i, node in enumerate(nodes)}
        mask = torch.zeros(len(nodes), len(self.columns), dtype=torch.bool)
        for row, node in enumerate(nodes):
            mask[row, [self.columns[above] for above in self.path(node)]] = True
        return Rows(
            line=self.line,
            token_ids=[self.token_ids[node] for node in nodes],
            start=self.line.end + first,
            num_wanted=len(nodes),
            states=states,
            positions=[self.line.end + len(self.ranks[node]) - 1 for node in nodes],
            mask=mask,
        )


Expand = Callable[[_Tree, list[int], Tensor], list[int]]
"""Continues nodes of a tree by their logits [len(nodes), V]; returns those of the new nodes that are to be continued too."""


def _grow_trees(
    passes: ForwardPasses, lines: Listing[Line], features: Mapping[str, Tensor], expand: Expand
) -> list[_Tree]:
    """Grow a tree on each line, a level of all trees in each pass."""
    trees = [_Tree(line.request, line=line) for line in lines]
    growing = [(tree, [-1]) for tree in trees if tree.line.is_wanted]
    rows = [passes.read(tree.line, features) for tree, _ in growing]
    while growing:
        prediction = passes.forward(rows)
        rows, grown, end = [], [], 0
        for tree, nodes in growing:
            first, end = end, end + len(nodes)
            newest = expand(tree, nodes, prediction.logits[first:end])
            if not newest:
                continue
            states = None
            if prediction.states is not None:
                row_of = {node: first + i for i, node in enumerate(nodes)}
                states = prediction.states[[row_of[tree.parents[node]] for node in newest]]
            rows.append(tree.rows(newest, states))
            grown.append((tree, newest))
        growing = grown
    return trees


class StaticTreeWriter:
    """A tree of one shape, one forward pass per level."""

    def __init__(self, choice: Choice, shape: StaticTree) -> None:
        self.num_places = shape.num_places
        self._choice = choice
        self._num_children = {ranks: shape.num_children(ranks) for ranks in ((), *shape.paths)}

    def write(self, passes: ForwardPasses, lines: Listing[Line], features: Mapping[str, Tensor]) -> list[Draft]:
        """See `Writer`."""
        return [tree.draft() for tree in _grow_trees(passes, lines, features, self._expand)]

    def _expand(self, tree: _Tree, nodes: list[int], logits: Tensor) -> list[int]:
        spots = [tree.spot(node, count=self._num_children[tree.ranks_of(node)]) for node in nodes]
        chosen = zip(nodes, self._choice.choose(logits, spots), strict=True)
        newest = [child for node, bets in chosen for child in tree.add(node, bets)]
        deepest = tree.line.max_depth
        return [node for node in newest if self._num_children[tree.ranks[node]] and len(tree.ranks[node]) < deepest]


class DynamicTreeWriter:
    """`DynamicTree`, of certain bets: what it holds depends on the probabilities of the tokens themselves."""

    def __init__(self, shape: DynamicTree, *, target_ids: Tensor | None) -> None:
        self.num_places = shape.num_places
        self._shape = shape
        self._target_ids = target_ids

    def write(self, passes: ForwardPasses, lines: Listing[Line], features: Mapping[str, Tensor]) -> list[Draft]:
        """See `Writer`."""
        return [_most_probable(tree) for tree in _grow_trees(passes, lines, features, self._expand)]

    def _expand(self, tree: _Tree, nodes: list[int], logits: Tensor) -> list[int]:
        found = logits.log_softmax(-1).topk(min(self._shape.top_k, logits.shape[1]))
        ids = found.indices if self._target_ids is None else self._target_ids[found.indices]
        newest: list[int] = []
        for node, token_ids, logprobs in zip(nodes, ids.tolist(), found.values.tolist(), strict=True):
            newest += tree.add(node, Bets(token_ids))
            above = tree.scores[node] if node >= 0 else 0.0
            tree.scores += [above + logprob for logprob in logprobs]
        if len(tree.ranks[-1]) >= min(self._shape.depth, tree.line.max_depth):
            return []
        return sorted(newest, key=lambda node: -tree.scores[node])[: self._shape.top_k]


def _most_probable(tree: _Tree) -> Draft:
    """The best nodes, as many as are wanted, best first: a child is never more probable than its parent."""
    best = sorted(range(len(tree.scores)), key=lambda node: (-tree.scores[node], node))[: tree.line.max_tokens]
    number = {node: i for i, node in enumerate(best)} | {-1: -1}
    return Draft(tuple(tree.token_ids[node] for node in best), tuple(number[tree.parents[node]] for node in best))
