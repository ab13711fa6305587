"""Trees that a device drafts after the texts in its table, a pass of a network for each level, without a word from the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Listing
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from forerun.drafters.neural.device import ChainNetwork, NetworkChains
from forerun.drafters.neural.device_picks import RankedPicks
from forerun.drafters.neural.device_texts import lengths_of
from forerun.drafters.neural.forward import Prediction
from forerun.drafters.neural.sampling import DraftSampler
from forerun.drafters.neural.tree import DynamicTree, Ranks, StaticTree
from forerun.drafters.neural.writers import ChainWriter, DynamicTreeWriter, StaticTreeWriter, Writer
from forerun.ops.cuda.chains import ChainPlan
from forerun.ops.cuda.functions import modules_for
from forerun.ops.cuda.passes import DeviceAttention
from forerun.ops.cuda.table import DeviceTable, RuleTable
from forerun.ops.cuda.trees import ROOT, TreeLevel, TreePlan

MOST_CANDIDATES = 4096
"""Nodes that the draft of a dynamic tree is chosen from on the device, at most: as many as torch sorts in one block of a GPU."""


class TreeFunctions(NamedTuple):
    """Those of `ops.cuda.trees`, and the races with runners-up of `ops.cuda.sampling`; or the kernels of the same names."""

    append: Callable[..., None]
    lay_out: Callable[..., None]
    write_best: Callable[..., None]
    write_paths: Callable[..., None]
    sample_first: Callable[..., None]

    @classmethod
    def choose(cls, device: torch.device) -> TreeFunctions:
        """The kernels on a GPU, the formulas elsewhere.

        Raises:
            ConfigError: triton is not installed.
        """
        trees, sampling = modules_for(device, "trees", "sampling")
        return cls.of(trees=trees, sampling=sampling)

    @classmethod
    def of(cls, *, trees: Any, sampling: Any) -> TreeFunctions:
        """Those of two modules of one kind."""
        return cls(trees.append, trees.lay_out, trees.write_best, trees.write_paths, sampling.sample_first)


class LevelPasses(Protocol):
    """The passes of a network by which trees after N texts grow, a level with each."""

    def begin(self) -> Prediction:
        """Predict after each text, at N rows."""
        ...

    def go_on(self, tokens: Tensor, columns: Tensor, states: Tensor | None) -> Prediction:
        """Predict after nodes of one level, at N * E rows: those of a tree one after the other.

        Args:
            tokens: [N, E] int32, -1: padding.
            columns: [N, E, D] int32, D the level's depth; see `ops.cuda.trees`.
            states: [N * E, width], of the rows that they continue; None where the network gives none.
        """
        ...


class TreeGrower(Protocol):
    """Does what a `Writer` of trees does, on the device: says which nodes there are, and which of them are read."""

    sampler: DraftSampler
    depth: int  # levels, at most

    def grow(self, plan: TreePlan, passes: LevelPasses, *, num_levels: int) -> None:
        """Draft trees of up to so many levels, at most `depth`."""
        ...


def tree_grower(writer: Writer, table: DeviceTable, rules: RuleTable) -> TreeGrower | None:
    """Grow the trees that a writer would write; None where it writes chains, or trees of too many candidates."""
    if isinstance(writer, DynamicTreeWriter):
        is_small = writer.shape.num_candidates <= MOST_CANDIDATES
        return DynamicTreeGrower(writer.sampler, writer.shape, table) if is_small else None
    if isinstance(writer, StaticTreeWriter):
        return StaticTreeGrower(writer.sampler, writer.shape, table, rules)
    if isinstance(writer, ChainWriter) and writer.num_runners_up:
        shape = StaticTree.chain(writer.num_places, writer.num_runners_up)
        return StaticTreeGrower(writer.sampler, shape, table, rules)
    return None


def device_trees(
    network: ChainNetwork, writer: Writer, table: DeviceTable, rules: RuleTable, sample: Callable[..., None]
) -> NetworkTrees | None:
    """Draft on the device what a writer would, where it writes trees of passes and the network needs no host; else None."""
    grower = tree_grower(writer, table, rules)
    if grower is None or not isinstance(network.attention, DeviceAttention) or not network.predictor.reads_tensors_only:
        return None
    return NetworkTrees(network, network.attention, grower.sampler, table, rules, sample, grower=grower)


class Level(NamedTuple):
    """What a shape has below the E rows of a pass; E' nodes of it are rows of the next one."""

    width: int  # tokens that are drafted after a row, at most
    growth: TreeLevel
    columns: Tensor  # [E', D] int32, of the path of each of the next rows
    parents: Tensor  # [E'] int64, the row that each of them continues


def levels_of(shape: StaticTree, device: torch.device) -> list[Level]:
    """The levels of a shape, from the root down."""
    levels: list[Level] = []
    rows: list[Ranks] = [()]
    columns: dict[Ranks, int] = {}
    for depth in range(shape.depth):
        children = [(*path, rank) for path in rows for rank in range(shape.num_children(path))]
        next_rows = [path for path in children if shape.num_children(path)]
        columns |= {path: len(columns) + i for i, path in enumerate(next_rows)}
        growth = TreeLevel(
            parents=_ints([rows.index(path[:-1]) for path in children], device),
            ranks=_ints([path[-1] for path in children], device),
            rows=_ints([next_rows.index(path) if path in next_rows else -1 for path in children], device),
        )
        on_paths = [columns[path[:above]] for path in next_rows for above in range(1, depth + 2)]
        levels.append(
            Level(
                width=1 + max(path[-1] for path in children),
                growth=growth,
                columns=_ints(on_paths, device).view(len(next_rows), depth + 1),
                parents=_ints([rows.index(path[:-1]) for path in next_rows], device).long(),
            )
        )
        rows = next_rows
    return levels


def _ints(values: Listing[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


class NetworkTrees(NetworkChains):
    """Writes trees: the pass over the texts drafts the first level, and each further one takes a pass over nodes of the level above.

    As many nodes of each tree are computed, where it lacks some, rows are padding. So shapes depend on the number of sequences alone.

    Args:
        parts: those of `NetworkChains`.
        grower: of the trees.
    """

    writes_trees = True

    def __init__(self, *parts: Any, grower: TreeGrower) -> None:
        super().__init__(*parts, depth=grower.depth)
        self._grower = grower
        self._lay_out = TreeFunctions.choose(self._table.tokens.device).lay_out

    def propose(
        self,
        slots: Tensor,
        limits: Tensor,
        depths: Tensor,
        num_computed: Tensor,
        features: Mapping[str, Tensor],
        *,
        most_tokens: int,
    ) -> None:
        """See `DeviceChains`."""
        depths = self._depths(slots, depths)
        limits = limits.masked_fill(depths == 0, 0)
        passes = _NetworkPasses(self, self._begin(slots, limits, num_computed), features)
        trees = TreePlan(slots=slots, limits=limits, depths=depths)
        self._grower.grow(trees, passes, num_levels=min(most_tokens, self._depth))

    def after_texts(self, plan: ChainPlan, features: Mapping[str, Tensor]) -> Prediction:
        """Read the texts, and predict after each."""
        return self._predict(*self._read(plan, features))

    def after_nodes(self, plan: ChainPlan, tokens: Tensor, columns: Tensor, states: Tensor | None) -> Prediction:
        """Read nodes of one level, and predict after each; see `LevelPasses.go_on`."""
        rows = self._rows(tokens.numel(), longest_path=columns.shape[2])
        self._lay_out(plan, self._table, tokens, columns, rows, block_size=self._network.cache.block_size)
        return self._predict(rows, states, torch.arange(tokens.numel(), device=tokens.device))


class _NetworkPasses(NamedTuple):
    """Implements `LevelPasses`."""

    trees: NetworkTrees
    plan: ChainPlan
    features: Mapping[str, Tensor]

    def begin(self) -> Prediction:
        return self.trees.after_texts(self.plan, self.features)

    def go_on(self, tokens: Tensor, columns: Tensor, states: Tensor | None) -> Prediction:
        return self.trees.after_nodes(self.plan, tokens, columns, states)


class StaticTreeGrower:
    """Grows trees of one shape: those nodes are read that get children in it."""

    def __init__(self, sampler: DraftSampler, shape: StaticTree, table: DeviceTable, rules: RuleTable) -> None:
        functions = TreeFunctions.choose(table.tokens.device)
        self.sampler = sampler
        self.depth = shape.depth
        self._table = table
        self._picks = RankedPicks(sampler, rules, functions.sample_first)
        self._append = functions.append
        self._levels = levels_of(shape, table.tokens.device)
        self._num_runners_up = shape.num_runners_up

    def grow(self, plan: TreePlan, passes: LevelPasses, *, num_levels: int) -> None:
        """See `TreeGrower`."""
        plan, lengths = replace(plan, depths=self._within(plan)), lengths_of(self._table, plan.slots)
        nodes = torch.full_like(plan.slots, ROOT)[:, None]
        slots = plan.slots.masked_fill(plan.limits == 0, -1)[:, None]  # of the rows that are predicted after
        predicted = passes.begin()
        for depth, level in enumerate(self._levels[:num_levels]):
            positions = (lengths - 1 + depth)[:, None].expand_as(slots)
            drafted = self._picks.tokens(predicted.logits, slots.flatten(), positions.flatten(), count=level.width)
            count = len(slots)
            grown = torch.empty((2, count, len(level.parents)), dtype=torch.int32, device=slots.device)
            self._append(
                *(plan, self._table, level.growth, drafted.view(count, -1, level.width), nodes, *grown), depth=depth
            )
            if depth + 1 < num_levels:
                tokens, nodes = grown
                slots = torch.where(tokens < 0, -1, plan.slots[:, None])
                states = _states_of(predicted.states, level.parents.expand(count, -1))
                predicted = passes.go_on(tokens, level.columns.expand(count, -1, -1), states)

    def _within(self, plan: TreePlan) -> Tensor:
        """How deep trees of so many tokens may be, where the shape is a chain with runners-up: it has no level beyond them."""
        if self._num_runners_up is None:
            return plan.depths
        return torch.minimum(plan.depths, (plan.limits + self._num_runners_up) // (1 + self._num_runners_up))


def _states_of(states: Tensor | None, parents: Tensor) -> Tensor | None:
    """The states to read the rows of a level with: those of their `parents` [N, E'] among the rows of each of N trees."""
    if states is None:
        return None
    by_tree = states.view(len(parents), -1, states.shape[1])
    return by_tree.gather(1, parents[:, :, None].expand(-1, -1, by_tree.shape[2])).flatten(0, 1)


class _Candidates(NamedTuple):
    """Nodes that N trees may have: C of each, numbered in the order in which the host's writer adds them."""

    tokens: Tensor  # [N, C] int32
    parents: Tensor  # [N, C] int32, the candidate that each continues; ROOT
    scores: Tensor  # [N, C] fp64, the log probability of each one's path; -inf: there is no such node


class _Beam(NamedTuple):
    """The nodes of one level that a pass reads: E of each tree, the most probable first."""

    nodes: Tensor  # [N, E] int32, their numbers as candidates; ROOT
    scores: Tensor  # [N, E] fp64
    columns: Tensor  # [N, E, D] int32, see `ops.cuda.trees`


class DynamicTreeGrower:
    """Grows `DynamicTree`s: those nodes of a level are read that are the most probable, and the best of all make the draft.

    Probabilities are those of the host's writer, sums in fp64 of logarithms in fp32; of equal ones the earlier node comes first.
    """

    def __init__(self, sampler: DraftSampler, shape: DynamicTree, table: DeviceTable) -> None:
        self.sampler = sampler
        self.depth = shape.depth
        self._top_k = shape.top_k
        self._table = table
        self._write_best = TreeFunctions.choose(table.tokens.device).write_best

    def grow(self, plan: TreePlan, passes: LevelPasses, *, num_levels: int) -> None:
        """See `TreeGrower`."""
        count, device = len(plan.slots), plan.slots.device
        beam = _Beam(
            nodes=torch.full_like(plan.slots, ROOT)[:, None],
            scores=torch.zeros((count, 1), dtype=torch.float64, device=device),
            columns=torch.empty((count, 1, 0), dtype=torch.int32, device=device),
        )
        levels: list[_Candidates] = []
        predicted = passes.begin()
        for depth in range(num_levels):
            levels.append(self._children(predicted.logits, beam, plan.depths > depth))
            if depth + 1 < num_levels:
                first = sum(level.tokens.shape[1] for level in levels[:-1])
                beam, tokens, parents = self._best(levels[-1], beam, first)
                tokens = tokens.masked_fill((plan.depths <= depth + 1)[:, None], -1)
                predicted = passes.go_on(tokens, beam.columns, _states_of(predicted.states, parents))
        candidates = _Candidates(*(torch.cat(parts, dim=1) for parts in zip(*levels, strict=True)))
        order = candidates.scores.sort(dim=1, descending=True, stable=True).indices
        self._write_best(plan, self._table, order[:, : self._table.draft_tokens.shape[1]], *candidates)

    def _children(self, logits: Tensor, beam: _Beam, is_there: Tensor) -> _Candidates:
        """The likeliest tokens after each row of a pass, by their logits [N * E, V]; none for trees where not `is_there` [N]."""
        found = logits.log_softmax(-1).topk(min(self._top_k, logits.shape[1]))
        ids = self.sampler.in_target(found.indices)
        by_row = (*beam.nodes.shape, -1)
        scores = (beam.scores[:, :, None] + found.values.view(by_row)).flatten(1)
        stands = is_there[:, None] & (scores > -torch.inf)
        return _Candidates(
            tokens=ids.int().view(by_row).flatten(1),
            parents=beam.nodes[:, :, None].expand(by_row[0], by_row[1], ids.shape[1]).flatten(1),
            scores=torch.where(stands, scores, -torch.inf),
        )

    def _best(self, level: _Candidates, beam: _Beam, first: int) -> tuple[_Beam, Tensor, Tensor]:
        """The most probable nodes of a level, whose first has the number `first`: their tokens [N, E'], -1 where there are fewer,
        and the rows [N, E'] of the pass before that they continue."""
        (count, num_rows, depth), num_children = beam.columns.shape, level.tokens.shape[1]
        scores, chosen = (found[:, : self._top_k] for found in level.scores.sort(dim=1, descending=True, stable=True))
        parents = chosen // (num_children // num_rows)
        above = beam.columns.gather(1, parents[:, :, None].expand(-1, -1, depth))
        own = depth * self._top_k + torch.arange(chosen.shape[1], dtype=torch.int32, device=chosen.device)
        columns = torch.cat([above, own[None, :, None].expand(count, -1, 1)], dim=2)
        tokens = level.tokens.gather(1, chosen).masked_fill(scores == -torch.inf, -1)
        return _Beam((first + chosen).int(), scores, columns), tokens, parents
