"""Trees that a device drafts after the texts in its table, a pass of a network for each level, without a word from the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Listing
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from forerun.drafters.neural.device import ChainNetwork, NetworkChains
from forerun.drafters.neural.sampling import DraftSampler
from forerun.drafters.neural.tree import DynamicTree, Ranks, StaticTree
from forerun.drafters.neural.writers import ChainWriter, DynamicTreeWriter, StaticTreeWriter, Writer
from forerun.ops.cuda.chains import ChainPlan
from forerun.ops.cuda.functions import modules_for
from forerun.ops.cuda.passes import DeviceAttention
from forerun.ops.cuda.table import DeviceTable, RuleTable, StepRows
from forerun.ops.cuda.trees import ROOT, TreeLevel

MOST_CANDIDATES = 4096
"""Nodes that the draft of a dynamic tree is chosen from on the device, at most: as many as torch sorts in one block of a GPU."""


class TreeFunctions(NamedTuple):
    """Those of `ops.cuda.trees`, and the races with runners-up of `ops.cuda.sampling`; or the kernels of the same names."""

    append: Callable[..., None]
    lay_out: Callable[..., None]
    write_best: Callable[..., None]
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
        return cls(trees.append, trees.lay_out, trees.write_best, sampling.sample_first)


def device_trees(
    network: ChainNetwork, writer: Writer, table: DeviceTable, rules: RuleTable, sample: Callable[..., None]
) -> NetworkTrees | None:
    """Draft on the device what a writer would, where it writes trees of passes and the network needs no host; else None."""
    if not isinstance(network.attention, DeviceAttention) or not network.predictor.reads_tensors_only:
        return None
    if isinstance(writer, DynamicTreeWriter):
        if writer.shape.num_candidates > MOST_CANDIDATES:
            return None
        parts = (network, network.attention, writer.sampler, table, rules, sample)
        return DeviceDynamicTreeWriter(*parts, shape=writer.shape)
    if isinstance(writer, StaticTreeWriter):
        shape = writer.shape
    elif isinstance(writer, ChainWriter) and writer.num_runners_up:
        shape = StaticTree.chain(writer.num_places, writer.num_runners_up)
    else:
        return None
    return DeviceTreeWriter(network, network.attention, writer.sampler, table, rules, sample, shape=shape)


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
    """

    writes_trees = True

    def __init__(
        self,
        network: ChainNetwork,
        attention: DeviceAttention,
        sampler: DraftSampler,
        table: DeviceTable,
        rules: RuleTable,
        sample: Callable[..., None],
        *,
        depth: int,
    ) -> None:
        # a step commits a path and one token more, and the token before them is read again
        network = network._replace(most_unread=min(network.most_unread, depth + 2))
        super().__init__(network, attention, sampler, table, rules, sample, depth=depth)
        self._sampler = sampler
        self._rules = rules
        self._tree_functions = TreeFunctions.choose(self._table.tokens.device)

    def _lay_out(self, plan: ChainPlan, tokens: Tensor, columns: Tensor) -> StepRows:
        """The rows of a pass over nodes of one level, see `ops.cuda.trees.lay_out`."""
        rows = self._rows(tokens.numel(), longest_path=columns.shape[2])
        self._tree_functions.lay_out(
            plan, self._table, tokens, columns, rows, block_size=self._network.cache.block_size
        )
        return rows


class DeviceTreeWriter(NetworkTrees):
    """Writes trees of one shape: those nodes are read that get children in it."""

    def __init__(self, *parts: Any, shape: StaticTree) -> None:
        super().__init__(*parts, depth=shape.depth)
        self._levels = levels_of(shape, self._table.tokens.device)
        self._num_runners_up = shape.num_runners_up

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
        count, levels = len(slots), self._levels[:most_tokens]
        depths = self._depths(slots, self._within(limits, depths))
        plan = self._begin(slots, limits.masked_fill(depths == 0, 0), num_computed)
        rows, states, at = self._read(plan, features)
        nodes = torch.full_like(slots, ROOT)[:, None]
        for depth, level in enumerate(levels):
            predicted = self._predict(rows, states, at)
            drafted = self._pick_first(predicted.logits, rows.slots[at], rows.positions[at], level.width)
            grown = torch.empty((2, count, len(level.parents)), dtype=torch.int32, device=slots.device)
            self._tree_functions.append(
                *(plan, depths, self._table, level.growth, drafted.view(count, -1, level.width), nodes, *grown),
                depth=depth,
            )
            if depth + 1 < len(levels):
                tokens, nodes = grown
                rows = self._lay_out(plan, tokens, level.columns.expand(count, -1, -1))
                states = _states_of(predicted.states, level.parents.expand(count, -1))
                at = torch.arange(tokens.numel(), device=slots.device)

    def _within(self, limits: Tensor, depths: Tensor) -> Tensor:
        """How deep trees of so many tokens may be, where the shape is a chain with runners-up: it has no level beyond them."""
        if self._num_runners_up is None:
            return depths
        return torch.minimum(depths, (limits + self._num_runners_up) // (1 + self._num_runners_up))

    def _pick_first(self, logits: Tensor, slots: Tensor, positions: Tensor, count: int) -> Tensor:
        """The first `count` tokens [R, count] int32 after rows at these positions, by their logits [R, V]; -1 where there are fewer."""
        likeliest = self._likeliest(logits, count)
        if self._sampler.takes_likeliest:
            return likeliest
        rows, raced = self._rows(len(slots)), torch.full_like(likeliest, -1)
        rows.slots.copy_(slots)
        rows.positions.copy_(positions)
        self._tree_functions.sample_first(self._sampler.spread(logits).contiguous(), rows, self._rules, raced)
        is_greedy = self._rules.temperature[slots.clamp(min=0).long()] == 0
        return torch.where(is_greedy[:, None], likeliest, raced)

    def _likeliest(self, logits: Tensor, count: int) -> Tensor:
        found = logits.argmax(-1, keepdim=True) if count == 1 else logits.topk(min(count, logits.shape[1])).indices
        if self._sampler.target_ids is not None:
            found = self._sampler.target_ids[found]
        return pad(found.int(), (0, count - found.shape[1]), value=-1)


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


class DeviceDynamicTreeWriter(NetworkTrees):
    """Writes `DynamicTree`s: those nodes of a level are read that are the most probable, and the best of all make the draft.

    Probabilities are those of the host's writer, sums in fp64 of logarithms in fp32; of equal ones the earlier node comes first.
    """

    def __init__(self, *parts: Any, shape: DynamicTree) -> None:
        super().__init__(*parts, depth=shape.depth)
        self._top_k = shape.top_k

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
        count, num_levels = len(slots), min(self._depth, most_tokens)
        depths = self._depths(slots, depths)
        plan = self._begin(slots, limits.masked_fill(depths == 0, 0), num_computed)
        rows, states, at = self._read(plan, features)
        beam = _Beam(
            nodes=torch.full_like(slots, ROOT)[:, None],
            scores=torch.zeros((count, 1), dtype=torch.float64, device=slots.device),
            columns=torch.empty((count, 1, 0), dtype=torch.int32, device=slots.device),
        )
        levels: list[_Candidates] = []
        for depth in range(num_levels):
            predicted = self._predict(rows, states, at)
            levels.append(self._children(predicted.logits, beam, depths > depth))
            if depth + 1 < num_levels:
                first = sum(level.tokens.shape[1] for level in levels[:-1])
                beam, tokens, parents = self._best(levels[-1], beam, first)
                tokens = tokens.masked_fill((depths <= depth + 1)[:, None], -1)
                rows = self._lay_out(plan, tokens, beam.columns)
                states = _states_of(predicted.states, parents)
                at = torch.arange(tokens.numel(), device=slots.device)
        candidates = _Candidates(*(torch.cat(parts, dim=1) for parts in zip(*levels, strict=True)))
        order = candidates.scores.sort(dim=1, descending=True, stable=True).indices
        self._tree_functions.write_best(plan, self._table, order[:, : self._table.draft_tokens.shape[1]], *candidates)

    def _children(self, logits: Tensor, beam: _Beam, is_there: Tensor) -> _Candidates:
        """The likeliest tokens after each row of a pass, by their logits [N * E, V]; none for trees where not `is_there` [N]."""
        found = logits.log_softmax(-1).topk(min(self._top_k, logits.shape[1]))
        ids = found.indices if self._sampler.target_ids is None else self._sampler.target_ids[found.indices]
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
