"""Drafts that a device builds where their tokens are predicted all at once: what `drafters.neural.parallel` builds on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from forerun.drafters.neural.device import ChainFunctions
from forerun.drafters.neural.device_picks import DevicePicks, RankedPicks
from forerun.drafters.neural.device_texts import lengths_of
from forerun.drafters.neural.device_trees import TreeFunctions, levels_of
from forerun.drafters.neural.parallel import DynamicTreeBuilder, StaticTreeBuilder, TreeBuilder
from forerun.drafters.neural.sampling import DraftSampler
from forerun.drafters.neural.tree import DynamicTree, StaticTree
from forerun.ops.cuda.table import DeviceTable, RuleTable
from forerun.ops.cuda.trees import ROOT, TreePlan


class DeviceBuilder(Protocol):
    """Does what a `TreeBuilder` does, on the device."""

    sampler: DraftSampler
    depth: int  # the number of predictions that it can use
    writes_trees: bool

    def build(self, plan: TreePlan, logits: Tensor) -> None:
        """Draft after N texts; logits [N, D, V] predict the tokens of D depths, at most `depth`, after each."""
        ...


def device_builder(
    builder: TreeBuilder, table: DeviceTable, rules: RuleTable, sample: Callable[..., None]
) -> DeviceBuilder:
    """Build on the device what a builder would."""
    if isinstance(builder, DynamicTreeBuilder):
        return DeviceDynamicTreeBuilder(builder.sampler, builder.shape, table)
    assert isinstance(builder, StaticTreeBuilder), "there are two"
    if builder.shape.num_runners_up == 0:
        return DeviceChainBuilder(builder.sampler, builder.depth, table, rules, sample)
    return DeviceStaticTreeBuilder(builder.sampler, builder.shape, table, rules)


class DeviceChainBuilder:
    """Builds chains."""

    writes_trees = False

    def __init__(
        self,
        sampler: DraftSampler,
        depth: int,
        table: DeviceTable,
        rules: RuleTable,
        sample: Callable[..., None],
    ) -> None:
        self.sampler = sampler
        self.depth = depth
        self._table = table
        self._picks = DevicePicks(sampler, rules, sample)
        self._write_chains = ChainFunctions.choose(table.tokens.device).write_chains

    def build(self, plan: TreePlan, logits: Tensor) -> None:
        """See `DeviceBuilder`."""
        slots, positions = _by_depth(plan, self._table, logits.shape[1])
        drafted = self._picks.tokens(logits.flatten(0, 1), slots.flatten(), positions.flatten())
        self._write_chains(self._table, plan.slots, plan.depths, drafted.view(slots.shape))


class DeviceStaticTreeBuilder:
    """Builds trees of one shape: the child of rank r is the token of rank r at its depth, whatever its parent."""

    writes_trees = True

    def __init__(self, sampler: DraftSampler, shape: StaticTree, table: DeviceTable, rules: RuleTable) -> None:
        functions = TreeFunctions.choose(table.tokens.device)
        self.sampler = sampler
        self.depth = shape.depth
        self._table = table
        self._picks = RankedPicks(sampler, rules, functions.sample_first)
        self._append = functions.append
        self._levels = levels_of(shape, table.tokens.device)

    def build(self, plan: TreePlan, logits: Tensor) -> None:
        """See `DeviceBuilder`."""
        num_depths = logits.shape[1]
        slots, positions = _by_depth(plan, self._table, num_depths)
        nodes = torch.full_like(plan.slots, ROOT)[:, None]
        for depth, level in enumerate(self._levels[:num_depths]):
            ranked = self._picks.tokens(logits[:, depth], slots[:, depth], positions[:, depth], count=level.width)
            drafted = ranked[:, None].expand(-1, nodes.shape[1], -1).contiguous()  # after each node the same
            grown = torch.empty((2, len(ranked), len(level.parents)), dtype=torch.int32, device=slots.device)
            self._append(plan, self._table, level.growth, drafted, nodes, *grown, depth=depth)
            nodes = grown[1]


class DeviceDynamicTreeBuilder:
    """Builds trees of the most probable paths of the `top_k` tokens at each depth."""

    writes_trees = True

    def __init__(self, sampler: DraftSampler, shape: DynamicTree, table: DeviceTable) -> None:
        self.sampler = sampler
        self.depth = shape.depth
        self._top_k = shape.top_k
        self._table = table
        self._write_paths = TreeFunctions.choose(table.tokens.device).write_paths

    def build(self, plan: TreePlan, logits: Tensor) -> None:
        """See `DeviceBuilder`."""
        found = logits.topk(min(self._top_k, logits.shape[2]))
        costs = logits.logsumexp(-1, keepdim=True) - found.values
        self._write_paths(plan, self._table, self.sampler.in_target(found.indices).int(), costs)


def _by_depth(plan: TreePlan, table: DeviceTable, num_depths: int) -> tuple[Tensor, Tensor]:
    """[N, D] each: the slots, and the positions that the tokens at each depth are predicted after; -1 where none is drafted."""
    depths = torch.arange(num_depths, dtype=torch.int32, device=plan.slots.device)
    slots = torch.where(depths < plan.depths[:, None], plan.slots[:, None], -1)
    return slots, lengths_of(table, plan.slots)[:, None] - 1 + depths
