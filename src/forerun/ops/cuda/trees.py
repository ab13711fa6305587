"""Growing draft trees after the texts of the device's table, level by level, by formula: the twin of `kernels.trees`.

A step's drafting calls `chains.take_blocks` and `chains.read_texts`. After each pass of the network a tree of a fixed shape has
its next level appended (`append`), and the nodes of it that get children are laid out for the next pass (`lay_out`). A tree whose
shape hangs on its nodes' probabilities is chosen from all candidates at the end (`write_best`).

Where one pass predicts all depths, whatever the tokens above are, all levels are appended after it, or the best paths of the tokens
at each depth are found (`write_paths`).

A row's column is where its entry lies in the network's cache: so many places behind the text. Columns are those of the shape, also
where a tree has fewer nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from forerun.ops.cuda.chains import ChainPlan, kv_slot
from forerun.ops.cuda.table import DeviceTable, StepRows

ROOT, NO_NODE = -1, -2
"""The nodes of rows that are no draft's: the last token of a text, and padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreePlan:
    """For which N sequences trees are drafted, and how large each may be."""

    slots: Tensor  # [N] int32, -1: padding
    limits: Tensor  # [N] int32, nodes
    depths: Tensor  # [N] int32, levels


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLevel:
    """What a shape has one level below E rows: C nodes, in order; E' of them are rows of the next pass."""

    parents: Tensor  # [C] the row that each continues
    ranks: Tensor  # [C] which of the tokens drafted after that row it is: 0 is the first
    rows: Tensor  # [C] its own row in the next pass; -1: nothing is drafted after it


def append(
    plan: TreePlan,
    table: DeviceTable,
    level: TreeLevel,
    drafted: Tensor,
    nodes: Tensor,
    next_tokens: Tensor,
    next_nodes: Tensor,
    *,
    depth: int,
) -> None:
    """Append the tokens drafted after the rows of a pass to the drafts, level by level, each in the order of its parents.

    Args:
        plan: of N sequences.
        table: drafts are changed.
        level: of E rows.
        drafted: [N, E, W] int32, the tokens after each row, the first one first; below 0: none.
        nodes: [N, E] int32, the node of each row: ROOT, or NO_NODE for padding.
        next_tokens: [N, E'] int32, written: the tokens of the next pass's rows; -1 for padding.
        next_nodes: [N, E'] int32, written: their nodes.
        depth: levels appended before.
    """
    children = list(zip(level.parents.tolist(), level.ranks.tolist(), level.rows.tolist(), strict=True))
    next_tokens.fill_(-1)
    next_nodes.fill_(NO_NODE)
    for n, slot in enumerate(plan.slots.tolist()):
        if slot < 0 or depth >= plan.depths[n]:
            continue
        size = int(table.draft_sizes[slot])
        for parent, rank, row in children:
            node, token = int(nodes[n, parent]), int(drafted[n, parent, rank])
            if node == NO_NODE or token < 0 or size >= plan.limits[n]:
                continue
            table.draft_tokens[slot, size], table.draft_parents[slot, size] = token, node
            if row >= 0 and depth + 1 < plan.depths[n]:
                next_tokens[n, row], next_nodes[n, row] = token, size
            size += 1
        table.draft_sizes[slot] = size


def lay_out(
    plan: ChainPlan, table: DeviceTable, tokens: Tensor, columns: Tensor, rows: StepRows, *, block_size: int
) -> None:
    """Lay out the rows of a pass over one level of each tree: each sees its text, and of the drafted tokens those of its own path.

    Args:
        plan: slots and blocks are read; of N sequences.
        table: lengths are read.
        tokens: [N, E] int32, -1: padding.
        columns: [N, E, D] int32, those of each row's path from the first level on, rising; the last is its own.
        rows: N * E, padding; tokens, positions, slots, kv_slots, num_linear and path_slots are written.
        block_size: places in a block.
    """
    num_rows, depth = columns.shape[1:]
    for n, slot in enumerate(plan.slots.tolist()):
        for e in range(num_rows):
            token, row = int(tokens[n, e]), n * num_rows + e
            if slot < 0 or token < 0:
                continue
            length, path = int(table.lengths[slot]), columns[n, e].tolist()
            places = [kv_slot(plan, slot, length + column, block_size) for column in path]
            num_linear = sum(column == i for i, column in enumerate(path))
            rows.tokens[row], rows.positions[row], rows.slots[row] = token, length + depth - 1, slot
            rows.kv_slots[row], rows.num_linear[row] = places[-1], length + num_linear
            for i, place in enumerate(places[num_linear:]):
                rows.path_slots[row, i] = place


def write_best(
    plan: TreePlan, table: DeviceTable, order: Tensor, tokens: Tensor, parents: Tensor, scores: Tensor
) -> None:
    """Make each draft of its best candidates.

    Args:
        plan: slots and limits are read; of N sequences.
        table: drafts are written.
        order: [N, B] int64, the best candidates of each, the best first; none comes before the one that it continues.
        tokens: [N, C] int32, those of the candidates.
        parents: [N, C] int32, the candidate that each continues; ROOT.
        scores: [N, C] fp64, falling in the order; -inf: there is no such candidate.
    """
    for n, slot in enumerate(plan.slots.tolist()):
        if slot < 0:
            continue
        there = [one for one in order[n].tolist() if scores[n, one] > -math.inf]
        best = there[: int(plan.limits[n])]
        for node, one in enumerate(best):
            above = int(parents[n, one])
            table.draft_tokens[slot, node] = tokens[n, one]
            table.draft_parents[slot, node] = best.index(above) if above in best else ROOT
        table.draft_sizes[slot] = len(best)


def write_paths(plan: TreePlan, table: DeviceTable, tokens: Tensor, costs: Tensor) -> None:
    """Make each draft of the cheapest paths of tokens that were predicted at each depth, whatever the tokens above them are.

    A path costs what its tokens do; it is added up in fp64, from the first level on. Of paths that cost the same the one whose
    parent was drafted earlier comes first, then the one of the lower rank. None costs infinitely much.

    Args:
        plan: of N sequences; no limit is higher than what a draft may have.
        table: drafts are written.
        tokens: [N, D, W] int32, those at each of D depths.
        costs: [N, D, W] fp32, theirs: 0 or more, and ascending at each depth.
    """
    num_depths, width = tokens.shape[1:]
    for n, slot in enumerate(plan.slots.tolist()):
        if slot < 0:
            continue
        own, deepest = costs[n].double().tolist(), min(int(plan.depths[n]), num_depths)
        # of the root, and then of each node: its cost, its depth, how many of its children are drafted
        above, depths, drafted = [0.0], [0], [0]
        size = 0
        while size < plan.limits[n]:
            nexts = [
                cost + own[depth][rank] if depth < deepest and rank < width else math.inf
                for cost, depth, rank in zip(above, depths, drafted, strict=True)
            ]
            cost = min(nexts)
            if cost == math.inf:
                break
            parent = nexts.index(cost)
            depth = depths[parent]
            table.draft_tokens[slot, size] = tokens[n, depth, drafted[parent]]
            table.draft_parents[slot, size] = parent - 1
            drafted[parent] += 1
            above, depths, drafted = [*above, cost], [*depths, depth + 1], [*drafted, 0]
            size += 1
        table.draft_sizes[slot] = size
