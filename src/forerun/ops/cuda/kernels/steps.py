"""The integers of a step: rows, match walk, commit, KV that moves; `ops.cuda.steps` is the twin and says what each does."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forerun.ops.cuda import table as layout
from forerun.ops.cuda.table import DevicePlan, DeviceTable, RuleTable, StepRows, Verdicts

ROWS_PER_PROGRAM = 64
ENTRIES_PER_PROGRAM = 1024

_NO_NODE = tl.constexpr(0x7FFFFFFF)
_BLOCK_TABLE = tl.constexpr(layout.BLOCK_TABLE)
_DRAFT_TOKENS = tl.constexpr(layout.DRAFT_TOKENS)
_DRAFT_PARENTS = tl.constexpr(layout.DRAFT_PARENTS)
_DRAFT_SIZES = tl.constexpr(layout.DRAFT_SIZES)
_COMPUTED = tl.constexpr(layout.COMPUTED)


@triton.jit(do_not_specialize=["N"])
def _place(
    changes, block_table, draft_tokens, draft_parents, draft_sizes, computed, N, B, K, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_there = i < N
    what, slot = tl.load(changes + i, is_there, -1), tl.load(changes + N + i, is_there, 0).to(tl.int64)
    column, value = tl.load(changes + 2 * N + i, is_there, 0), tl.load(changes + 3 * N + i, is_there, 0)
    tl.store(block_table + slot * B + column, value, what == _BLOCK_TABLE)
    tl.store(draft_tokens + slot * K + column, value, what == _DRAFT_TOKENS)
    tl.store(draft_parents + slot * K + column, value, what == _DRAFT_PARENTS)
    tl.store(draft_sizes + slot, value, what == _DRAFT_SIZES)
    tl.store(computed + slot, value, what == _COMPUTED)


def place(changes: Tensor, table: DeviceTable) -> None:
    """Write what the host has changed; see `ops.cuda.steps.place`.

    Args:
        changes: [4, n] int32 contiguous: of what, slot, column, value; each place once.
        table: changed.
    """
    num_changes = changes.shape[1]
    _place[(triton.cdiv(num_changes, ROWS_PER_PROGRAM),)](
        *(changes, table.block_table, table.draft_tokens, table.draft_parents, table.draft_sizes, table.computed),
        *(num_changes, table.block_table.shape[1], table.draft_tokens.shape[1]),
        BLOCK=ROWS_PER_PROGRAM,
        num_warps=1,
    )


@triton.jit(do_not_specialize=["N", "T", "R"])
def _clear_and_count(
    plan_slots, tails, most_drafted, ends, draft_sizes, ended,
    row_tokens, positions, slots, parents, kv_slots, num_linear, first_rows, judged, first_judged,
    N, T, R, N_BLOCK: tl.constexpr, ROW_BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, N_BLOCK)
    slot = tl.load(plan_slots + n, n < N, -1)
    is_there = slot >= 0
    is_there = is_there & (tl.load(ended + slot, is_there, 1) == 0)
    tail = tl.load(tails + n, is_there, 0)
    may_draft = is_there & (tl.load(ends + n, is_there, 0) != 0)
    drafted = tl.minimum(tl.load(most_drafted + n, may_draft, 0), tl.load(draft_sizes + slot, may_draft, 0))
    num_rows = tail + drafted
    last = tl.cumsum(num_rows, 0)
    tl.store(first_rows + n, last - num_rows, n < N)
    tl.store(first_rows + N, tl.sum(num_rows, 0))
    num_judged = tl.where(may_draft, 1 + drafted, 0)
    tl.store(first_judged + n, tl.cumsum(num_judged, 0) - num_judged, n < N)
    tl.store(first_judged + N, tl.sum(num_judged, 0))
    for first in range(0, T, ROW_BLOCK):
        row = first + tl.arange(0, ROW_BLOCK)
        zeros = tl.zeros((ROW_BLOCK,), tl.int32)
        tl.store(row_tokens + row, zeros, row < T)
        tl.store(positions + row, zeros, row < T)
        tl.store(num_linear + row, zeros, row < T)
        tl.store(slots + row, zeros - 1, row < T)
        tl.store(parents + row, zeros - 1, row < T)
        tl.store(kv_slots + row, (zeros - 1).to(tl.int64), row < T)
        tl.store(judged + row, zeros - 1, row < R)


@triton.jit
def _kv_slot(block_table, place, is_there, BLOCK_SIZE: tl.constexpr):
    block = tl.load(block_table + place // BLOCK_SIZE, is_there, 0)
    return block.to(tl.int64) * BLOCK_SIZE + place % BLOCK_SIZE


@triton.jit(do_not_specialize=["T", "R"])
def _lay_out(
    plan_slots, tails, tokens, computed, block_table, draft_tokens, draft_parents,
    row_tokens, positions, slots, parents, kv_slots, num_linear, path_slots, first_rows, judged, first_judged,
    L, B, K, D, T, R, BLOCK_SIZE: tl.constexpr, ROW_BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    slot = tl.load(plan_slots + n).to(tl.int64)
    first, end = tl.load(first_rows + n), tl.load(first_rows + n + 1)
    k = tl.program_id(1) * ROW_BLOCK + tl.arange(0, ROW_BLOCK)
    row = first + k
    if (slot >= 0) & (tl.program_id(1) * ROW_BLOCK < end - first):
        is_row = (row < end) & (row < T)
        start, tail = tl.load(computed + slot), tl.load(tails + n)
        blocks = block_table + slot * B
        node = k - tail
        is_node = is_row & (node >= 0)
        # A node's depth; then how many of its ancestors, itself included, do not lie at the place of their depth.
        depth = is_node.to(tl.int32)
        at = tl.load(draft_parents + slot * K + node, is_node, -1)
        while tl.max(at, 0) >= 0:
            depth += (at >= 0).to(tl.int32)
            at = tl.load(draft_parents + slot * K + at, at >= 0, -1)
        position = tl.where(is_node, start + tail - 1 + depth, start + k)
        num_apart = tl.zeros_like(depth)
        at = tl.where(is_node & (node != depth - 1), node, -1)
        while tl.max(at, 0) >= 0:
            num_apart += (at >= 0).to(tl.int32)
            at = tl.load(draft_parents + slot * K + at, at >= 0, -1)
            at = tl.where(at != depth - 1 - num_apart, at, -1)
        at = tl.where(num_apart > 0, node, -1)
        step = num_apart - 1
        while tl.max(at, 0) >= 0:
            is_apart = (at >= 0) & (step >= 0)
            found = _kv_slot(blocks, start + tail + at, is_apart, BLOCK_SIZE)
            tl.store(path_slots + row.to(tl.int64) * D + step, found.to(tl.int32), is_apart)
            step -= 1
            at = tl.load(draft_parents + slot * K + at, is_apart, -1)
        above = tl.load(draft_parents + slot * K + node, is_node, -1)
        parent = tl.where(is_node, first + tail + above, tl.where(k > 0, row - 1, -1))
        tail_token = tl.load(tokens + slot * L + start + k, is_row & (node < 0), 0)
        token = tl.where(is_node, tl.load(draft_tokens + slot * K + node, is_node, 0), tail_token)
        tl.store(row_tokens + row, token, is_row)
        tl.store(positions + row, position, is_row)
        tl.store(slots + row, tl.zeros_like(row) + slot.to(tl.int32), is_row)
        tl.store(parents + row, parent, is_row)
        tl.store(kv_slots + row, _kv_slot(blocks, start + k, is_row, BLOCK_SIZE), is_row)
        tl.store(num_linear + row, position + 1 - num_apart, is_row)
        place, last_place = tl.load(first_judged + n) + k - tail + 1, tl.load(first_judged + n + 1)
        tl.store(judged + place, row, is_row & (k >= tail - 1) & (place < last_place) & (place < R))


def prepare(plan: DevicePlan, table: DeviceTable, rows: StepRows, *, block_size: int) -> None:
    """Lay out the step's rows; see `ops.cuda.steps.prepare`.

    Args:
        plan: which sequences, and how many rows of each; together at most T, and R of them to be judged.
        table: tokens, computed, ended, block_table and drafts are read.
        rows: written; rows that no sequence needs become padding.
        block_size: places in a block of the cache.
    """
    num_sequences, num_rows, num_judged = len(plan.slots), len(rows.slots), len(rows.judged)
    _clear_and_count[(1,)](
        *(plan.slots, plan.tails, plan.most_drafted, plan.ends, table.draft_sizes, table.ended),
        *(rows.tokens, rows.positions, rows.slots, rows.parents, rows.kv_slots, rows.num_linear, rows.first_rows),
        *(rows.judged, rows.first_judged, num_sequences, num_rows, num_judged),
        N_BLOCK=triton.next_power_of_2(num_sequences),
        ROW_BLOCK=ROWS_PER_PROGRAM,
    )
    _lay_out[(num_sequences, triton.cdiv(num_rows, ROWS_PER_PROGRAM))](
        *(plan.slots, plan.tails, table.tokens, table.computed, table.block_table),
        *(table.draft_tokens, table.draft_parents),
        *(rows.tokens, rows.positions, rows.slots, rows.parents, rows.kv_slots, rows.num_linear, rows.path_slots),
        *(rows.first_rows, rows.judged, rows.first_judged),
        *(table.tokens.shape[1], table.block_table.shape[1], table.draft_tokens.shape[1]),
        *(rows.path_slots.shape[1], num_rows, num_judged),
        BLOCK_SIZE=block_size,
        ROW_BLOCK=ROWS_PER_PROGRAM,
    )


@triton.jit
def _match(
    plan_slots, tails, ends, draft_tokens, draft_parents, first_rows, sampled,
    accepted, num_accepted, tokens, num_tokens, K, K_BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    slot = tl.load(plan_slots + n).to(tl.int64)
    nodes = tl.arange(0, K_BLOCK)
    path = tl.full((K_BLOCK,), -1, tl.int32)  # entry i: the i-th accepted node
    texts = tl.full((K_BLOCK,), -1, tl.int32)  # entry i: the target's token before it
    count = 0
    token = -1
    is_judged = (slot >= 0) & (tl.load(ends + n) != 0) & (tl.load(first_rows + n) < tl.load(first_rows + n + 1))
    if is_judged:
        root = tl.load(first_rows + n) + tl.load(tails + n) - 1
        is_node = nodes < tl.load(first_rows + n + 1) - root - 1
        drafted = tl.load(draft_tokens + slot * K + nodes, is_node, -1)
        parents = tl.load(draft_parents + slot * K + nodes, is_node, -2)
        token = tl.load(sampled + root)
        first_token = token
        node = tl.min(tl.where((parents == -1) & (drafted == token) & is_node, nodes, _NO_NODE), 0)
        while node != _NO_NODE:
            path = tl.where(nodes == count, node, path)
            texts = tl.where(nodes == count, token, texts)
            count += 1
            token = tl.load(sampled + root + 1 + node)
            node = tl.min(tl.where((parents == node) & (drafted == token) & is_node, nodes, _NO_NODE), 0)
        if token < 0:
            count = 0
            token = first_token
    is_accepted = nodes < count
    tl.store(accepted + n * K + nodes, tl.where(is_accepted, path, -1), nodes < K)
    tl.store(tokens + n * (K + 1) + nodes, tl.where(is_accepted, texts, tl.where(nodes == count, token, -1)), nodes < K)
    tl.store(tokens + n * (K + 1) + K, tl.where(count == K, token, -1))
    tl.store(num_accepted + n, count)
    tl.store(num_tokens + n, tl.where(token >= 0, count + 1, 0))


def match(plan: DevicePlan, table: DeviceTable, rows: StepRows, sampled: Tensor, verdicts: Verdicts) -> None:
    """Walk down each draft while some child is the target's own token; see `ops.cuda.steps.match`.

    Args:
        plan: slots, tails and ends are read.
        table: drafts are read.
        rows: `first_rows` is read.
        sampled: [T] int32, the target's token after each row, or -1.
        verdicts: written.
    """
    most_drafted = table.draft_tokens.shape[1]
    _match[(len(plan.slots),)](
        *(plan.slots, plan.tails, plan.ends, table.draft_tokens, table.draft_parents, rows.first_rows, sampled),
        *(verdicts.accepted, verdicts.num_accepted, verdicts.tokens, verdicts.num_tokens, most_drafted),
        K_BLOCK=triton.next_power_of_2(most_drafted),
        num_warps=1,
    )


@triton.jit
def _move(
    plan_slots, tails, kv_slots, first_rows, accepted, num_accepted, entries,
    K, num_slots, width, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    if tl.load(plan_slots + n) >= 0:
        first = tl.load(first_rows + n) + tl.load(tails + n)
        at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        layer = entries + tl.program_id(1).to(tl.int64) * num_slots * width
        # Nodes rise along a path, so no destination is a later source; a program moves the same entries each time.
        for i in range(tl.load(num_accepted + n)):
            node = tl.load(accepted + n * K + i)
            if node != i:
                source, destination = tl.load(kv_slots + first + node), tl.load(kv_slots + first + i)
                tl.store(layer + destination * width + at, tl.load(layer + source * width + at, at < width), at < width)


def move(plan: DevicePlan, rows: StepRows, verdicts: Verdicts, entries: Tensor) -> None:
    """Move what lies at the accepted nodes' slots to the places behind the tail; see `ops.cuda.steps.move`.

    Args:
        plan: slots and tails are read.
        rows: `kv_slots` and `first_rows` are read.
        verdicts: of `match`.
        entries: [C, num_slots, ...] contiguous, changed in place.
    """
    num_layers, num_slots = entries.shape[:2]
    width = entries[0, 0].numel()
    block = min(ENTRIES_PER_PROGRAM, triton.next_power_of_2(width))
    _move[(len(plan.slots), num_layers, triton.cdiv(width, block))](
        *(plan.slots, plan.tails, rows.kv_slots, rows.first_rows, verdicts.accepted, verdicts.num_accepted, entries),
        *(verdicts.accepted.shape[1], num_slots, width),
        BLOCK=block,
    )


@triton.jit
def _commit(
    plan_slots, tails, ends, tokens, lengths, computed, ended, draft_sizes, counts, min_lengths, max_lengths, stop_ids,
    num_accepted, committed, num_committed, L, V, K, NUM_STOPS, K_BLOCK: tl.constexpr, STOP_BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    slot = tl.load(plan_slots + n).to(tl.int64)
    if tl.load(ended + slot, slot >= 0, 1) == 0:
        i = tl.arange(0, K_BLOCK)
        length = tl.load(lengths + slot)
        longest = tl.minimum(tl.load(max_lengths + slot), L)
        num_tokens = tl.minimum(tl.load(num_committed + n), tl.maximum(longest - length, 0))
        is_new = i < num_tokens
        token = tl.load(committed + n * (K + 1) + i, is_new, 0)
        tl.store(tokens + slot * L + length + i, token, is_new)
        tl.atomic_add(counts + slot * V + token, 1, is_new)
        tl.store(lengths + slot, length + num_tokens)
        tl.store(computed + slot, tl.load(computed + slot) + tl.load(tails + n) + tl.load(num_accepted + n))
        if tl.load(ends + n) != 0:
            tl.store(draft_sizes + slot, 0)
            stop = tl.arange(0, STOP_BLOCK)
            stops = tl.load(stop_ids + slot * NUM_STOPS + stop, stop < NUM_STOPS, -1)
            is_stop = tl.max((token[:, None] == stops[None, :]).to(tl.int32), 1) != 0
            after = length + i + 1
            is_last = is_new & ((after >= longest) | (is_stop & (after >= tl.load(min_lengths + slot))))
            tl.store(ended + slot, tl.where(num_tokens == 0, 1, tl.max(is_last.to(tl.int32), 0)))


def commit(plan: DevicePlan, table: DeviceTable, rules: RuleTable, verdicts: Verdicts) -> None:
    """Append what was committed to the texts, count it, forget the drafts, note what has ended; see `ops.cuda.steps.commit`.

    Args:
        plan: slots, tails and ends are read.
        table: tokens, lengths, computed, ended and draft_sizes are changed, of texts that have not ended before.
        rules: counts are changed; min_length, max_length and stop_ids are read.
        verdicts: of `match`.
    """
    most_drafted, num_stops = verdicts.accepted.shape[1], rules.stop_ids.shape[1]
    _commit[(len(plan.slots),)](
        *(plan.slots, plan.tails, plan.ends),
        *(table.tokens, table.lengths, table.computed, table.ended, table.draft_sizes),
        *(rules.counts, rules.min_length, rules.max_length, rules.stop_ids),
        *(verdicts.num_accepted, verdicts.tokens, verdicts.num_tokens),
        *(table.tokens.shape[1], rules.counts.shape[1], most_drafted, num_stops),
        K_BLOCK=triton.next_power_of_2(most_drafted + 1),
        STOP_BLOCK=triton.next_power_of_2(num_stops),
        num_warps=1,
    )
