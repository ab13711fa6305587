"""Writers that feed their own tokens back: one forward pass for each token of a chain or each level of a tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from forerun.core.draft import NO_DRAFT, Draft
from forerun.drafters.base import TargetInfo
from forerun.drafters.neural.forward import DraftSequence, ForwardPasses, QueryRows
from forerun.drafters.neural.sampling import DraftSampler, DraftSampling
from forerun.drafters.neural.tree import DraftedTokens, DraftPosition, DynamicTree, GrowingTree, StaticTree
from forerun.ops.native.chains import DraftedChain


class DraftNetwork(Protocol):
    """A network with logits over the target's vocabulary or a part of it: a `Predictor`, or one without KV."""

    target_ids: (
        Tensor | None
    )  # [V] int64, the target's token of each logit; None where the logits cover all of them in order


class Writer(Protocol):
    """Writes the drafts of a step, those of all sequences together."""

    num_places: int  # KV places beyond the text that a draft needs

    def write(
        self, passes: ForwardPasses, sequences: Listing[DraftSequence], hidden_states: Mapping[str, Tensor]
    ) -> list[Draft]:
        """Write one draft per sequence; a sequence that wants none is not read either."""
        ...


def make_writer(sampling: DraftSampling, target: TargetInfo, network: DraftNetwork) -> Writer:
    """Make the writer of a chain or tree, whichever `sampling` asks for.

    Raises:
        ConfigError: the tree has more nodes than a draft may have.
    """
    sampling.check_size(target.num_speculative_tokens)
    sampler = sampling.sampler(vocab_size=target.vocab_size, target_ids=network.target_ids)
    if isinstance(sampling.tree, DynamicTree):
        return DynamicTreeWriter(sampler, sampling.tree)
    if sampling.tree is None:
        return ChainWriter(sampler, depth=target.num_speculative_tokens)
    num_runners_up = sampling.tree.num_runners_up
    if num_runners_up is not None:
        return ChainWriter(sampler, depth=sampling.tree.depth, num_runners_up=num_runners_up)
    return StaticTreeWriter(sampler, sampling.tree)


@dataclass(slots=True)
class _GrowingChain:
    sequence: DraftSequence
    num_runners_up: int
    levels: list[list[int]] = field(default_factory=list)  # at each depth the chain's token, and then its runners-up
    margins: list[float] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)
    chance: float = 1.0  # that all of it stands

    @property
    def token_ids(self) -> list[int]:
        return [level[0] for level in self.levels]

    def position(self) -> DraftPosition:
        num_tokens = 1 + self.num_runners_up
        return DraftPosition(
            self.sequence.request,
            tuple(self.token_ids),
            num_tokens=num_tokens,
            noise_index=len(self.levels) * num_tokens,
        )

    def grow(self, drafted: DraftedTokens) -> bool:
        """Append the drafted token, if there is one; return whether the chain may grow further."""
        if not drafted.token_ids:
            return False
        self.levels.append(drafted.token_ids)
        self.margins.append(drafted.margin)
        self.probs += drafted.probs or []
        stop = self.sequence.request.early_stop
        if stop is not None:
            self.chance *= stop.chance_of(drafted.margin)
            if self.chance < stop.least_chance:
                return False
        return len(self.levels) < self.sequence.depth_of_chain(self.num_runners_up)

    def rows(self, state: Tensor | None) -> QueryRows:
        """The row of the last token, to be read with `state` [width]."""
        return QueryRows(
            sequence=self.sequence,
            token_ids=self.levels[-1][:1],
            start=self.sequence.draft_start + len(self.levels) - 1,
            num_predicted=1,
            states=None if state is None else state[None],
        )

    def draft(self) -> Draft:
        chain = DraftedChain(self.levels, self.margins)
        return _as_draft(chain, self.sequence.max_tokens, torch.stack(self.probs) if self.probs else None)


class ChainWriter:
    """Writes at most `depth` tokens one after the other: one forward pass each, or all in one call where the network can.

    Each token may have runners-up beside it, the next best ones of the same logits, which nothing is drafted after. Its margin
    over the first of them is then known, and a chain ends where the request's `early_stop` says so.
    """

    def __init__(self, sampler: DraftSampler, *, depth: int, num_runners_up: int = 0) -> None:
        self.num_places = depth
        self.sampler = sampler
        self.num_runners_up = num_runners_up

    def write(
        self, passes: ForwardPasses, sequences: Listing[DraftSequence], hidden_states: Mapping[str, Tensor]
    ) -> list[Draft]:
        """See `Writer`."""
        for sequence in sequences:
            sequence.max_depth = min(sequence.max_depth, self.num_places)
        drafts = self._write_at_once(passes, sequences, hidden_states)
        if drafts is not None:
            return drafts
        chains = [_GrowingChain(sequence, self.num_runners_up) for sequence in sequences]
        growing = [chain for chain in chains if chain.sequence.wants_draft]
        rows = [passes.read(chain.sequence, hidden_states) for chain in growing]
        while growing:
            prediction = passes.forward(rows)
            drafted = self.sampler.sample(prediction.logits, [chain.position() for chain in growing])
            states = [None] * len(growing) if prediction.states is None else prediction.states
            grown = [
                (chain, state)
                for chain, tokens, state in zip(growing, drafted, states, strict=True)
                if chain.grow(tokens)
            ]
            growing = [chain for chain, _ in grown]
            rows = [chain.rows(state) for chain, state in grown]
        return [chain.draft() for chain in chains]

    def _write_at_once(
        self, passes: ForwardPasses, sequences: Listing[DraftSequence], hidden_states: Mapping[str, Tensor]
    ) -> list[Draft] | None:
        """The same drafts in one call; None where the network cannot, or a request's tokens are drawn with odds of their own."""
        growing: list[DraftSequence] = []
        is_greedy: list[bool] = []
        for sequence in sequences:
            if not sequence.wants_draft:
                continue
            greedy = self.sampler.is_greedy(sequence.request)
            if not greedy and not self.sampler.may_race(sequence.request):
                return None
            growing.append(sequence)
            is_greedy.append(greedy)
        if not growing:
            return [NO_DRAFT] * len(sequences)
        drafted = passes.draft_chains(growing, is_greedy, hidden_states, num_runners_up=self.num_runners_up)
        if drafted is None:
            return None
        chains = iter(drafted)
        return [
            _as_draft(next(chains), sequence.max_tokens) if sequence.wants_draft else NO_DRAFT for sequence in sequences
        ]


def _as_draft(chain: DraftedChain, max_tokens: int, probs: Tensor | None = None) -> Draft:
    """The first `max_tokens` nodes of a chain and its runners-up, if there are any."""
    if all(len(level) == 1 for level in chain.levels):
        return Draft(tuple(level[0] for level in chain.levels), None, probs)
    token_ids: list[int] = []
    parents: list[int] = []
    above = -1
    for level in chain.levels:
        first = len(token_ids)
        token_ids += level
        parents += [above] * len(level)
        above = first
    return Draft(tuple(token_ids), tuple(parents), probs, margins=tuple(chain.margins)).first(max_tokens)


@dataclass(slots=True, kw_only=True)
class _TreeInPasses(GrowingTree):
    """A growing tree whose nodes the network reads; `columns` maps a node to its number in the order of reading.

    `scores[i]` is the log probability of node i's path; only a dynamic tree keeps them.
    """

    sequence: DraftSequence
    scores: list[float] = field(default_factory=list)
    columns: dict[int, int] = field(default_factory=dict)

    def rows(self, nodes: Listing[int], states: Tensor | None) -> QueryRows:
        """The rows of nodes whose ancestors have been read, each with its row of `states` [len(nodes), width]."""
        first = len(self.columns)
        self.columns |= {node: first + i for i, node in enumerate(nodes)}
        mask = torch.zeros(len(nodes), len(self.columns), dtype=torch.bool)
        for row, node in enumerate(nodes):
            mask[row, [self.columns[above] for above in self.path(node)]] = True
        draft_start = self.sequence.draft_start
        return QueryRows(
            sequence=self.sequence,
            token_ids=[self.token_ids[node] for node in nodes],
            start=draft_start + first,
            num_predicted=len(nodes),
            states=states,
            positions=[draft_start + len(self.ranks[node]) - 1 for node in nodes],
            tree_mask=mask,
        )


Expand = Callable[[_TreeInPasses, list[int], Tensor], list[int]]
"""Adds children to nodes of a tree by their logits [len(nodes), V]; returns those children that get children too."""


def _grow_trees(
    passes: ForwardPasses, sequences: Listing[DraftSequence], hidden_states: Mapping[str, Tensor], expand: Expand
) -> list[_TreeInPasses]:
    """Grow a tree after each sequence, one level of all trees in each pass."""
    trees = [_TreeInPasses(sequence.request, sequence=sequence) for sequence in sequences]
    growing = [(tree, [-1]) for tree in trees if tree.sequence.wants_draft]
    rows = [passes.read(tree.sequence, hidden_states) for tree, _ in growing]
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
    """Writes trees of one shape, one forward pass per level."""

    def __init__(self, sampler: DraftSampler, shape: StaticTree) -> None:
        self.num_places = shape.num_places
        self.sampler = sampler
        self.shape = shape
        self._num_children = {ranks: shape.num_children(ranks) for ranks in ((), *shape.paths)}

    def write(
        self, passes: ForwardPasses, sequences: Listing[DraftSequence], hidden_states: Mapping[str, Tensor]
    ) -> list[Draft]:
        """See `Writer`."""
        return [tree.draft() for tree in _grow_trees(passes, sequences, hidden_states, self._expand)]

    def _expand(self, tree: _TreeInPasses, nodes: list[int], logits: Tensor) -> list[int]:
        positions = [tree.position(node, num_tokens=self._num_children[tree.ranks_of(node)]) for node in nodes]
        drafted = zip(nodes, self.sampler.sample(logits, positions), strict=True)
        newest = [child for node, tokens in drafted for child in tree.add(node, tokens)]
        deepest = tree.sequence.max_depth
        return [node for node in newest if self._num_children[tree.ranks[node]] and len(tree.ranks[node]) < deepest]


class DynamicTreeWriter:
    """Writes `DynamicTree`s of the likeliest tokens: which nodes they have depends on the tokens' probabilities."""

    def __init__(self, sampler: DraftSampler, shape: DynamicTree) -> None:
        self.num_places = shape.num_places
        self.sampler = sampler
        self.shape = shape

    def write(
        self, passes: ForwardPasses, sequences: Listing[DraftSequence], hidden_states: Mapping[str, Tensor]
    ) -> list[Draft]:
        """See `Writer`."""
        trees = _grow_trees(passes, sequences, hidden_states, self._expand)
        return [most_probable(tree, tree.scores, tree.sequence.max_tokens) for tree in trees]

    def _expand(self, tree: _TreeInPasses, nodes: list[int], logits: Tensor) -> list[int]:
        found = logits.log_softmax(-1).topk(min(self.shape.top_k, logits.shape[1]))
        ids = self.sampler.in_target(found.indices)
        newest: list[int] = []
        for node, token_ids, logprobs in zip(nodes, ids.tolist(), found.values.tolist(), strict=True):
            newest += tree.add(node, DraftedTokens(token_ids))
            above = tree.scores[node] if node >= 0 else 0.0
            tree.scores += [above + logprob for logprob in logprobs]
        if len(tree.ranks[-1]) >= min(self.shape.depth, tree.sequence.max_depth):
            return []
        return sorted(newest, key=lambda node: -tree.scores[node])[: self.shape.top_k]


def most_probable(tree: GrowingTree, scores: Listing[float], max_tokens: int) -> Draft:
    """A draft of the most probable nodes, the best first; a child is never more probable than its parent."""
    best = sorted(range(len(scores)), key=lambda node: (-scores[node], node))[:max_tokens]
    number = {node: i for i, node in enumerate(best)} | {-1: -1}
    return Draft(tuple(tree.token_ids[node] for node in best), tuple(number[tree.parents[node]] for node in best))
