"""What the rules change in the logits before anything is drawn from them; `ops.cuda.edits` is the twin.

A program edits one block of one row. Lists of a few tokens (biases, stop tokens, a drafted path) are compared with the whole
block, so that no program writes where another reads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forerun.ops.cuda import table as layout
from forerun.ops.cuda.kernels.noise import EXACT
from forerun.ops.cuda.table import DeviceTable, RuleTable, StepRows

BLOCK = 1024

_HAS_PENALTIES = tl.constexpr(layout.HAS_PENALTIES)
_HAS_BIAS = tl.constexpr(layout.HAS_BIAS)
_HAS_ALLOWED = tl.constexpr(layout.HAS_ALLOWED)
_HAS_MIN_LENGTH = tl.constexpr(layout.HAS_MIN_LENGTH)


@triton.jit
def _bits(mask, ids, in_range):
    """Whether the mask has each token's bit: pointer to the row's words, integers -> bool."""
    return ((tl.load(mask + ids // 32, in_range, 0) >> (ids % 32)) & 1) == 1


@triton.jit
def _counts(counts, ids, in_range, row, tokens, positions, parents, length):
    """How often output and drafted path hold each token."""
    found = tl.load(counts + ids, in_range, 0)
    at = tl.where(tl.load(positions + row) >= length, row, -1)
    while at >= 0:
        found += (ids == tl.load(tokens + at)).to(tl.int32)
        parent = tl.load(parents + at)
        is_drafted = tl.load(positions + parent, parent >= 0, -1) >= length
        at = tl.where(is_drafted, parent, -1)
    return found.to(tl.float32)


@triton.jit
def _edit(
    logits, slots, tokens, positions, parents, lengths,
    flags_of, allowed, min_lengths, stop_ids, bias_ids, bias_values,
    repetitions, frequencies, presences, counts, in_prompt, row_masks, has_row_mask,
    V, W, NUM_STOP: tl.constexpr, NUM_BIAS: tl.constexpr, HAS_ROW_MASKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, ids = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        flags = tl.load(flags_of + slot)
        is_masked = tl.load(has_row_mask + row) if HAS_ROW_MASKS else 0
        if (flags | is_masked) != 0:
            in_range = ids < V
            at = logits + row.to(tl.int64) * V + ids
            values = tl.load(at, in_range, float("-inf"))
            position = tl.load(positions + row)
            if flags & _HAS_ALLOWED:
                values = tl.where(_bits(allowed + slot * W, ids, in_range), values, float("-inf"))
            if HAS_ROW_MASKS:
                if is_masked != 0:
                    values = tl.where(_bits(row_masks + row.to(tl.int64) * W, ids, in_range), values, float("-inf"))
            if flags & _HAS_MIN_LENGTH:
                if position + 1 < tl.load(min_lengths + slot):
                    for i in range(NUM_STOP):
                        values = tl.where(ids == tl.load(stop_ids + slot * NUM_STOP + i), float("-inf"), values)
            if flags & _HAS_BIAS:
                for i in range(NUM_BIAS):
                    is_biased = ids == tl.load(bias_ids + slot * NUM_BIAS + i)
                    values = tl.where(is_biased, values + tl.load(bias_values + slot * NUM_BIAS + i), values)
            if flags & _HAS_PENALTIES:
                length = tl.load(lengths + slot)
                count = _counts(counts + slot * V, ids, in_range, row, tokens, positions, parents, length)
                touched = _bits(in_prompt + slot * W, ids, in_range) | (count > 0)
                repetition = tl.load(repetitions + slot)
                scaled = tl.where(
                    values > 0, tl.div_rn(values, tl.zeros_like(values) + repetition), values * repetition
                )
                scaled = scaled - tl.load(frequencies + slot) * count
                scaled = scaled - tl.where(count > 0, tl.load(presences + slot), 0.0)
                values = tl.where(touched, scaled, values)
            tl.store(at, values, in_range)


def edit(
    logits: Tensor,
    rows: StepRows,
    table: DeviceTable,
    rules: RuleTable,
    *,
    row_masks: Tensor | None = None,
    has_row_mask: Tensor | None = None,
) -> None:
    """Make each row's edits in place; rows without any are not read. See `ops.cuda.edits.edit`.

    Args:
        logits: [T, V] fp32, contiguous.
        rows: of the step.
        table: `lengths` is read.
        rules: of each slot.
        row_masks: [T, W] int32 bit masks of grammars, or None.
        has_row_mask: [T] int32, 1 where the row has a mask; None where `row_masks` is.
    """
    num_rows, vocab_size = logits.shape
    block = min(BLOCK, triton.next_power_of_2(vocab_size))
    _edit[(num_rows, triton.cdiv(vocab_size, block))](
        *(logits, rows.slots, rows.tokens, rows.positions, rows.parents, table.lengths),
        *(rules.flags, rules.allowed, rules.min_length, rules.stop_ids, rules.bias_ids, rules.bias_values),
        *(rules.repetition, rules.frequency, rules.presence, rules.counts, rules.in_prompt),
        *(rules.allowed if row_masks is None else row_masks, rules.flags if has_row_mask is None else has_row_mask),
        *(vocab_size, rules.allowed.shape[1]),
        NUM_STOP=rules.stop_ids.shape[1],
        NUM_BIAS=rules.bias_ids.shape[1],
        HAS_ROW_MASKS=row_masks is not None,
        BLOCK=block,
        **EXACT,
    )
