"""The rows of a network that drafts chains; `ops.cuda.chains` is the twin and says what is computed."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forerun.ops.cuda.chains import ChainPlan
from forerun.ops.cuda.table import DeviceTable, StepRows

BLOCKS_PER_PROGRAM = 1024


@triton.jit(do_not_specialize=["first_scratch", "scratch_per_slot"])
def _take_blocks(
    slots, lengths, block_table, blocks, first_scratch, scratch_per_slot, B, P,
    BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    if slot >= 0:
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        num_used = (tl.load(lengths + slot) - 1 + BLOCK_SIZE - 1) // BLOCK_SIZE
        own = tl.load(block_table + slot * B + i, i < num_used, 0)
        beyond = i - num_used
        scratch = first_scratch + slot.to(tl.int32) * scratch_per_slot + beyond
        block = tl.where(i < num_used, own, tl.where(beyond < scratch_per_slot, scratch, 0))
        tl.store(blocks + slot * P + i, block, i < P)


def take_blocks(
    plan: ChainPlan, table: DeviceTable, *, block_size: int, first_scratch: int, scratch_per_slot: int
) -> None:
    """List the blocks of each text and scratch blocks after them; see `ops.cuda.chains.take_blocks`."""
    num_blocks = plan.blocks.shape[1]
    block = min(BLOCKS_PER_PROGRAM, triton.next_power_of_2(num_blocks))
    _take_blocks[(len(plan.slots), triton.cdiv(num_blocks, block))](
        *(plan.slots, table.lengths, table.block_table, plan.blocks, first_scratch, scratch_per_slot),
        *(table.block_table.shape[1], num_blocks),
        BLOCK_SIZE=block_size,
        BLOCK=block,
    )


@triton.jit
def _kv_slot(blocks, slot, place, is_real, P, BLOCK_SIZE: tl.constexpr):
    block = tl.load(blocks + slot * P + place // BLOCK_SIZE, is_real, 0).to(tl.int64)
    return block * BLOCK_SIZE + place % BLOCK_SIZE


@triton.jit
def _store_rows(
    at, in_range, is_real, token, place, slot, blocks,
    row_tokens, row_positions, row_slots, row_kv_slots, row_num_linear, P, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Write rows of tokens at places of a text, and padding where they are not real."""
    tl.store(row_tokens + at, tl.where(is_real, token, 0), in_range)
    tl.store(row_positions + at, tl.where(is_real, place, 0), in_range)
    tl.store(row_num_linear + at, tl.where(is_real, place + 1, 0), in_range)
    tl.store(row_slots + at, tl.where(is_real, slot, -1).to(tl.int32), in_range)
    kv_slot = _kv_slot(blocks, slot, place, is_real, P, BLOCK_SIZE)
    tl.store(row_kv_slots + at, tl.where(is_real, kv_slot, -1), in_range)


@triton.jit
def _read_texts(
    slots, starts, limits, blocks, tokens, lengths,
    row_tokens, row_positions, row_slots, row_kv_slots, row_num_linear, last_rows, slots_before, L, P,
    ROWS: tl.constexpr, ROWS_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    n, i = tl.program_id(0), tl.arange(0, ROWS_BLOCK)
    slot = tl.load(slots + n).to(tl.int64)
    is_read = (slot >= 0) & (tl.load(limits + n) > 0)
    start = tl.load(starts + n)
    end = tl.load(lengths + slot, slot >= 0, 0)
    tl.store(last_rows + n, (n * ROWS + tl.where(is_read, end - 1 - start, 0)).to(tl.int64))
    place = start + i
    is_real = is_read & (place < end) & (i < ROWS)
    at, in_range = n * ROWS + i, i < ROWS
    token = tl.load(tokens + slot * L + place, is_real, 0)
    _store_rows(
        at, in_range, is_real, token, place, slot, blocks,
        row_tokens, row_positions, row_slots, row_kv_slots, row_num_linear, P, BLOCK_SIZE,
    )  # fmt: skip
    before = _kv_slot(blocks, slot, tl.maximum(place - 1, 0), is_real, P, BLOCK_SIZE)
    tl.store(slots_before + at, tl.where(is_real, before, 0), in_range)


def read_texts(
    plan: ChainPlan, table: DeviceTable, rows: StepRows, last_rows: Tensor, slots_before: Tensor, *, block_size: int
) -> None:
    """Lay out the committed tokens that the network has not read; see `ops.cuda.chains.read_texts`."""
    most_rows = len(rows.slots) // len(plan.slots)
    _read_texts[(len(plan.slots),)](
        *(plan.slots, plan.starts, plan.limits, plan.blocks, table.tokens, table.lengths),
        *(rows.tokens, rows.positions, rows.slots, rows.kv_slots, rows.num_linear, last_rows, slots_before),
        *(table.tokens.shape[1], plan.blocks.shape[1]),
        ROWS=most_rows,
        ROWS_BLOCK=triton.next_power_of_2(most_rows),
        BLOCK_SIZE=block_size,
        num_warps=1,
    )


@triton.jit(do_not_specialize=["token_id"])
def _place_masks(
    slots, num_masks, blocks, lengths,
    row_tokens, row_positions, row_slots, row_kv_slots, row_num_linear, token_id, P,
    MASKS: tl.constexpr, MASKS_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    n, i = tl.program_id(0), tl.arange(0, MASKS_BLOCK)
    slot = tl.load(slots + n).to(tl.int64)
    in_range = i < MASKS
    is_real = in_range & (slot >= 0) & (i < tl.load(num_masks + n))
    place = tl.load(lengths + slot, slot >= 0, 0) + i
    _store_rows(
        n * MASKS + i, in_range, is_real, token_id, place, slot, blocks,
        row_tokens, row_positions, row_slots, row_kv_slots, row_num_linear, P, BLOCK_SIZE,
    )  # fmt: skip


def place_masks(
    plan: ChainPlan, table: DeviceTable, num_masks: Tensor, rows: StepRows, *, token_id: int, block_size: int
) -> None:
    """Lay out masks at the places behind each text; see `ops.cuda.chains.place_masks`."""
    most_masks = len(rows.slots) // len(plan.slots)
    if not most_masks:
        return
    _place_masks[(len(plan.slots),)](
        *(plan.slots, num_masks, plan.blocks, table.lengths),
        *(rows.tokens, rows.positions, rows.slots, rows.kv_slots, rows.num_linear, token_id, plan.blocks.shape[1]),
        MASKS=most_masks,
        MASKS_BLOCK=triton.next_power_of_2(most_masks),
        BLOCK_SIZE=block_size,
        num_warps=1,
    )


@triton.jit(do_not_specialize=["depth"])
def _extend(
    slots, limits, blocks, lengths, draft_tokens, draft_parents, draft_sizes, drafted,
    row_tokens, row_positions, row_slots, row_kv_slots, row_num_linear, depth, K, P,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    slot, limit, token = tl.load(slots + n).to(tl.int64), tl.load(limits + n), tl.load(drafted + n)
    grows = (slot >= 0) & (depth < limit) & (token >= 0) & (tl.load(draft_sizes + slot, slot >= 0, -1) == depth)
    tl.store(draft_tokens + slot * K + depth, token, grows)
    tl.store(draft_parents + slot * K + depth, depth - 1, grows)
    is_real = grows & (depth + 1 < limit)
    place = tl.load(lengths + slot, is_real, 0) + depth
    tl.store(draft_sizes + slot, depth + 1, grows)
    tl.store(row_tokens + n, tl.where(is_real, token, 0))
    tl.store(row_positions + n, tl.where(is_real, place, 0))
    tl.store(row_num_linear + n, tl.where(is_real, place + 1, 0))
    tl.store(row_slots + n, tl.where(is_real, slot, -1).to(tl.int32))
    kv_slot = _kv_slot(blocks, slot, place, is_real, P, BLOCK_SIZE)
    tl.store(row_kv_slots + n, tl.where(is_real, kv_slot, -1))


def extend(
    plan: ChainPlan, table: DeviceTable, drafted: Tensor, rows: StepRows, *, depth: int, block_size: int
) -> None:
    """Append the tokens drafted at one depth, and lay out their rows; see `ops.cuda.chains.extend`."""
    _extend[(len(plan.slots),)](
        *(plan.slots, plan.limits, plan.blocks, table.lengths),
        *(table.draft_tokens, table.draft_parents, table.draft_sizes, drafted),
        *(rows.tokens, rows.positions, rows.slots, rows.kv_slots, rows.num_linear),
        *(depth, table.draft_tokens.shape[1], plan.blocks.shape[1]),
        BLOCK_SIZE=block_size,
        num_warps=1,
    )


@triton.jit
def _write_chains(
    slots, limits, drafted, draft_tokens, draft_parents, draft_sizes, K,
    DEPTH: tl.constexpr, DEPTH_BLOCK: tl.constexpr,
):  # fmt: skip
    n, depth = tl.program_id(0), tl.arange(0, DEPTH_BLOCK)
    slot = tl.load(slots + n).to(tl.int64)
    token = tl.load(drafted + n * DEPTH + depth, depth < DEPTH, -1)
    stands = (token >= 0) & (depth < tl.load(limits + n))
    size = tl.min(tl.where(stands, DEPTH_BLOCK, depth), 0)
    is_drafted = (slot >= 0) & (depth < size)
    tl.store(draft_tokens + slot * K + depth, token, is_drafted)
    tl.store(draft_parents + slot * K + depth, depth - 1, is_drafted)
    tl.store(draft_sizes + slot, size, slot >= 0)


def write_chains(table: DeviceTable, slots: Tensor, limits: Tensor, drafted: Tensor) -> None:
    """Make drafts of the tokens predicted at each depth; see `ops.cuda.chains.write_chains`."""
    depth = drafted.shape[1]
    _write_chains[(len(slots),)](
        *(slots, limits, drafted.contiguous(), table.draft_tokens, table.draft_parents, table.draft_sizes),
        table.draft_tokens.shape[1],
        DEPTH=depth,
        DEPTH_BLOCK=triton.next_power_of_2(depth),
        num_warps=1,
    )
