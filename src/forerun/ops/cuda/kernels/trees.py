"""Growing draft trees after the texts of the device's table; `ops.cuda.trees` is the twin and says what is computed."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forerun.ops.cuda import trees
from forerun.ops.cuda.chains import ChainPlan
from forerun.ops.cuda.kernels.chains import _kv_slot
from forerun.ops.cuda.table import DeviceTable, StepRows
from forerun.ops.cuda.trees import TreeLevel, TreePlan

_ROOT, _NO_NODE = tl.constexpr(trees.ROOT), tl.constexpr(trees.NO_NODE)


@triton.jit(do_not_specialize=["depth"])
def _append(
    slots, limits, depths, draft_tokens, draft_parents, draft_sizes, parents, ranks, rows, drafted, nodes,
    next_tokens, next_nodes, depth, K, C, E, W, NEXT, BLOCK: tl.constexpr,
):  # fmt: skip
    n, i = tl.program_id(0), tl.arange(0, BLOCK)
    slot, limit, deepest = tl.load(slots + n).to(tl.int64), tl.load(limits + n), tl.load(depths + n)
    parent, rank = tl.load(parents + i, i < C, 0), tl.load(ranks + i, i < C, 0)
    node = tl.load(nodes + n * E + parent, i < C, _NO_NODE)
    token = tl.load(drafted + (n * E + parent) * W + rank, i < C, -1)
    is_there = (slot >= 0) & (depth < deepest) & (node != _NO_NODE) & (token >= 0)
    size = tl.load(draft_sizes + slot, slot >= 0, 0)
    own = size + tl.cumsum(is_there.to(tl.int32), 0) - 1
    is_there = is_there & (own < limit)
    tl.store(draft_tokens + slot * K + own, token, is_there)
    tl.store(draft_parents + slot * K + own, node, is_there)
    tl.store(draft_sizes + slot, size + tl.sum(is_there.to(tl.int32), 0), slot >= 0)
    row = tl.load(rows + i, i < C, -1)
    is_read = is_there & (depth + 1 < deepest)
    tl.store(next_tokens + n * NEXT + row, tl.where(is_read, token, -1), row >= 0)
    tl.store(next_nodes + n * NEXT + row, tl.where(is_read, own, _NO_NODE), row >= 0)


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
    """Append the tokens drafted after the rows of a pass to the drafts; see `ops.cuda.trees.append`."""
    (num_planned, num_rows, width), num_children = drafted.shape, len(level.parents)
    _append[(num_planned,)](
        *(plan.slots, plan.limits, plan.depths, table.draft_tokens, table.draft_parents, table.draft_sizes),
        *(level.parents, level.ranks, level.rows, drafted, nodes, next_tokens, next_nodes),
        *(depth, table.draft_tokens.shape[1], num_children, num_rows, width, next_tokens.shape[1]),
        BLOCK=triton.next_power_of_2(num_children),
        num_warps=1,
    )


@triton.jit
def _lay_out(
    slots, blocks, lengths, tokens, columns,
    row_tokens, row_positions, row_slots, row_kv_slots, row_num_linear, path_slots,
    P, E, columns_of_next, D, MOST, ROWS_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    n, e = tl.program_id(0), tl.arange(0, ROWS_BLOCK)
    slot = tl.load(slots + n).to(tl.int64)
    token = tl.load(tokens + n * E + e, e < E, -1)
    is_real = (slot >= 0) & (token >= 0)
    length = tl.load(lengths + slot, slot >= 0, 0)
    row = n.to(tl.int64) * E + e
    path = columns + n.to(tl.int64) * columns_of_next + e * D
    num_linear = tl.zeros_like(token)
    kv_slot = tl.zeros_like(row)
    for i in range(D):
        column = tl.load(path + i, is_real, 0)
        kv_slot = _kv_slot(blocks, slot, length + column, is_real, P, BLOCK_SIZE)
        num_linear += (column == i).to(tl.int32)
        tl.store(path_slots + row * MOST + i - num_linear, kv_slot.to(tl.int32), is_real & (column != i))
    tl.store(row_tokens + row, token, is_real)
    tl.store(row_positions + row, tl.zeros_like(token) + length + D - 1, is_real)
    tl.store(row_slots + row, tl.zeros_like(token) + slot.to(tl.int32), is_real)
    tl.store(row_kv_slots + row, kv_slot, is_real)
    tl.store(row_num_linear + row, length + num_linear, is_real)


def lay_out(
    plan: ChainPlan, table: DeviceTable, tokens: Tensor, columns: Tensor, rows: StepRows, *, block_size: int
) -> None:
    """Lay out the rows of a pass over one level of each tree; see `ops.cuda.trees.lay_out`."""
    num_planned, num_rows, depth = columns.shape
    _lay_out[(num_planned,)](
        *(plan.slots, plan.blocks, table.lengths, tokens, columns),
        *(rows.tokens, rows.positions, rows.slots, rows.kv_slots, rows.num_linear, rows.path_slots),
        *(plan.blocks.shape[1], num_rows, columns.stride(0), depth, rows.path_slots.shape[1]),
        ROWS_BLOCK=triton.next_power_of_2(num_rows),
        BLOCK_SIZE=block_size,
        num_warps=1,
    )


@triton.jit
def _write_best(
    slots, limits, draft_tokens, draft_parents, draft_sizes, order, tokens, parents, scores, K, B, ORDER, C,
    BLOCK: tl.constexpr,
):  # fmt: skip
    n, i = tl.program_id(0), tl.arange(0, BLOCK)
    slot = tl.load(slots + n).to(tl.int64)
    order += n.to(tl.int64) * ORDER
    one = tl.load(order + i, i < B, 0) + n.to(tl.int64) * C
    is_there = (slot >= 0) & (i < B) & (i < tl.load(limits + n))
    is_there = is_there & (tl.load(scores + one, is_there, float("-inf")) > float("-inf"))
    above = tl.load(parents + one, is_there, _ROOT)
    parent = tl.full((BLOCK,), _ROOT, tl.int32)
    for node in range(B):
        parent = tl.where(above == tl.load(order + node), node, parent)
    tl.store(draft_tokens + slot * K + i, tl.load(tokens + one, is_there, 0), is_there)
    tl.store(draft_parents + slot * K + i, parent, is_there)
    tl.store(draft_sizes + slot, tl.sum(is_there.to(tl.int32), 0), slot >= 0)


def write_best(
    plan: TreePlan, table: DeviceTable, order: Tensor, tokens: Tensor, parents: Tensor, scores: Tensor
) -> None:
    """Make each draft of its best candidates; see `ops.cuda.trees.write_best`."""
    num_planned, num_best = order.shape
    _write_best[(num_planned,)](
        *(plan.slots, plan.limits, table.draft_tokens, table.draft_parents, table.draft_sizes),
        *(order, tokens, parents, scores, table.draft_tokens.shape[1], num_best, order.stride(0), tokens.shape[1]),
        BLOCK=triton.next_power_of_2(num_best),
        num_warps=1,
    )


@triton.jit
def _write_paths(
    slots, limits, deepest, draft_tokens, draft_parents, draft_sizes, tokens, costs, K, D, W, BLOCK: tl.constexpr,
):  # fmt: skip
    """Number 0 is the root, number i + 1 node i: each has at most one child that may come next, so of equal ones the first does."""
    n, i = tl.program_id(0), tl.arange(0, BLOCK)
    slot = tl.load(slots + n).to(tl.int64)
    if slot >= 0:
        num_depths = tl.minimum(tl.load(deepest + n), D)
        tokens += n.to(tl.int64) * D * W
        costs += n.to(tl.int64) * D * W
        none = tl.full((), float("inf"), tl.float64)
        above, depths, drafted = (
            tl.zeros((BLOCK,), tl.float64),
            tl.zeros((BLOCK,), tl.int32),
            tl.zeros((BLOCK,), tl.int32),
        )
        nexts = tl.where(i == 0, tl.load(costs + i, (i == 0) & (num_depths > 0), float("inf")).to(tl.float64), none)
        size = tl.full((), 0, tl.int32)
        for node in range(tl.load(limits + n)):
            cost = tl.min(nexts, 0)
            if cost < none:
                parent = tl.min(tl.where(nexts == cost, i, BLOCK), 0)
                is_parent, is_node = i == parent, i == node + 1
                depth = tl.sum(tl.where(is_parent, depths, 0), 0)
                rank = tl.sum(tl.where(is_parent, drafted, 0), 0)
                tl.store(draft_tokens + slot * K + node, tl.load(tokens + depth * W + rank))
                tl.store(draft_parents + slot * K + node, parent - 1)
                drafted = tl.where(is_parent, rank + 1, drafted)
                depths = tl.where(is_node, depth + 1, depths)
                above = tl.where(is_node, cost, above)
                may_follow = (is_parent & (rank + 1 < W)) | (is_node & (depth + 1 < num_depths))
                own = tl.load(costs + depths * W + drafted, may_follow, float("inf")).to(tl.float64)
                nexts = tl.where(is_parent | is_node, above + own, nexts)
                size += 1
        tl.store(draft_sizes + slot, size)


def write_paths(plan: TreePlan, table: DeviceTable, tokens: Tensor, costs: Tensor) -> None:
    """Make each draft of the cheapest paths of tokens predicted at each depth; see `ops.cuda.trees.write_paths`."""
    num_planned, num_depths, width = tokens.shape
    most_drafted = table.draft_tokens.shape[1]
    _write_paths[(num_planned,)](
        *(plan.slots, plan.limits, plan.depths, table.draft_tokens, table.draft_parents, table.draft_sizes),
        *(tokens, costs, most_drafted, num_depths, width),
        BLOCK=triton.next_power_of_2(most_drafted + 1),
        num_warps=1,
    )
