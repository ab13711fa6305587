"""The rows of a network that drafts chains after the texts of the device's table, by formula: the twin of `kernels.chains`.

A step's drafting calls `take_blocks` and `read_texts`, and then, after each pass of the network, `extend`. Where all tokens are
predicted before any is written, of masks that `place_masks` has laid out or by heads without rows, it ends with `write_chains`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from forerun.ops.cuda.table import DeviceTable, StepRows


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainPlan:
    """For which N sequences chains are drafted; P blocks of a text and of what is drafted after it."""

    slots: Tensor  # [N] int32, -1: padding
    starts: Tensor  # [N] int32, the first place that the network has not read
    limits: Tensor  # [N] int32, tokens of the draft; 0: the text is not even read
    blocks: Tensor  # [S, P] int32, written by `take_blocks`


def take_blocks(
    plan: ChainPlan, table: DeviceTable, *, block_size: int, first_scratch: int, scratch_per_slot: int
) -> None:
    """List the blocks of each text up to its last token but one, and after them scratch blocks of its slot.

    So nothing that drafting writes lies in a block that others may get before the text has grown into it.

    Args:
        plan: slots are read; rows of `blocks` are written.
        table: lengths and block_table are read.
        block_size: places in a block.
        first_scratch: the first scratch block; those of slot s begin at s * `scratch_per_slot` behind it.
        scratch_per_slot: how many a slot has.
    """
    for slot in plan.slots.tolist():
        if slot < 0:
            continue
        num_used = -(-(int(table.lengths[slot]) - 1) // block_size)
        plan.blocks[slot] = 0
        plan.blocks[slot, :num_used] = table.block_table[slot, :num_used]
        for i in range(scratch_per_slot):
            plan.blocks[slot, num_used + i] = first_scratch + slot * scratch_per_slot + i


def read_texts(
    plan: ChainPlan, table: DeviceTable, rows: StepRows, last_rows: Tensor, slots_before: Tensor, *, block_size: int
) -> None:
    """Lay out the committed tokens that the network has not read, from `starts` to the end of each text.

    Args:
        plan: of N sequences.
        table: tokens and lengths are read.
        rows: N * R, R for each sequence; tokens, positions, slots, kv_slots and num_linear are written. Those that a
            sequence does not need become padding.
        last_rows: [N] int64, written: the row of each text's last token, its first row where nothing is read.
        slots_before: [N * R] int64, written: where what belongs to the token before each row's lies; its own at place 0,
            0 for padding.
        block_size: places in a block.
    """
    most_rows = len(rows.slots) // len(plan.slots)
    for n, slot in enumerate(plan.slots.tolist()):
        start, end = int(plan.starts[n]), int(table.lengths[slot]) if slot >= 0 else 0
        is_read = slot >= 0 and plan.limits[n] > 0
        last_rows[n] = n * most_rows + (end - 1 - start if is_read else 0)
        for i in range(most_rows):
            row, place = n * most_rows + i, start + i
            if not is_read or place >= end:
                _write_padding(rows, row)
                slots_before[row] = 0
            else:
                _write_row(rows, row, plan, slot, place, int(table.tokens[slot, place]), block_size)
                slots_before[row] = kv_slot(plan, slot, max(place - 1, 0), block_size)


def place_masks(
    plan: ChainPlan, table: DeviceTable, num_masks: Tensor, rows: StepRows, *, token_id: int, block_size: int
) -> None:
    """Lay out masks at the places behind each text, which stand for tokens that are not known yet.

    Args:
        plan: of N sequences.
        table: lengths are read.
        num_masks: [N] int32, of each text, at most M; below 1: none.
        rows: N * M, M for each sequence, written as by `read_texts`.
        token_id: the mask.
        block_size: places in a block.
    """
    most_masks = len(rows.slots) // len(plan.slots)
    for n, slot in enumerate(plan.slots.tolist()):
        for i in range(most_masks):
            if slot < 0 or i >= num_masks[n]:
                _write_padding(rows, n * most_masks + i)
            else:
                _write_row(rows, n * most_masks + i, plan, slot, int(table.lengths[slot]) + i, token_id, block_size)


def extend(
    plan: ChainPlan, table: DeviceTable, drafted: Tensor, rows: StepRows, *, depth: int, block_size: int
) -> None:
    """Append the tokens drafted at one depth to the chains, and lay out their rows for the next pass.

    Args:
        plan: of N sequences.
        table: lengths are read; drafts are changed. A chain has `depth` tokens, or has ended before.
        drafted: [N] int32, the tokens; below 0: none, and the chain ends.
        rows: N, one for each sequence, written as by `read_texts`: padding where the chain has ended.
        depth: tokens drafted before.
        block_size: places in a block.
    """
    for n, slot in enumerate(plan.slots.tolist()):
        _write_padding(rows, n)
        if slot < 0 or depth >= plan.limits[n] or table.draft_sizes[slot] != depth or drafted[n] < 0:
            continue
        table.draft_tokens[slot, depth], table.draft_parents[slot, depth] = drafted[n], depth - 1
        table.draft_sizes[slot] = depth + 1
        if depth + 1 < plan.limits[n]:
            _write_row(rows, n, plan, slot, int(table.lengths[slot]) + depth, int(drafted[n]), block_size)


def write_chains(table: DeviceTable, slots: Tensor, limits: Tensor, drafted: Tensor) -> None:
    """Make drafts of the tokens predicted at each depth.

    Args:
        table: drafts are written.
        slots: [N] int32, -1: padding.
        limits: [N] int32, tokens of each draft, at most.
        drafted: [N, D] int32, D no more than a draft may have; a chain ends before a token below 0.
    """
    for n, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        size = 0
        while size < min(int(limits[n]), drafted.shape[1]) and drafted[n, size] >= 0:
            table.draft_tokens[slot, size], table.draft_parents[slot, size] = drafted[n, size], size - 1
            size += 1
        table.draft_sizes[slot] = size


def _write_padding(rows: StepRows, row: int) -> None:
    rows.tokens[row] = rows.positions[row] = rows.num_linear[row] = 0
    rows.slots[row] = rows.kv_slots[row] = -1


def _write_row(
    rows: StepRows, row: int, plan: ChainPlan, slot: int, place: int, token_id: int, block_size: int
) -> None:
    rows.tokens[row], rows.positions[row], rows.num_linear[row] = token_id, place, place + 1
    rows.slots[row], rows.kv_slots[row] = slot, kv_slot(plan, slot, place, block_size)


def kv_slot(plan: ChainPlan, slot: int, place: int, block_size: int) -> int:
    """The KV slot of a place of a sequence by its drafter's block table."""
    return int(plan.blocks[slot, place // block_size]) * block_size + place % block_size
