"""What the rules change in the logits before anything is drawn from them, by formula: the twin of `kernels.edits`."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.ops.cuda.table import (
    HAS_ALLOWED,
    HAS_BIAS,
    HAS_MIN_LENGTH,
    HAS_PENALTIES,
    DeviceTable,
    RuleTable,
    StepRows,
)


def edit(
    logits: Tensor,
    rows: StepRows,
    table: DeviceTable,
    rules: RuleTable,
    *,
    row_masks: Tensor | None = None,
    has_row_mask: Tensor | None = None,
) -> None:
    """Make each row's edits in place, as `ops.edits.RowEdits` orders them; rows without any are not read.

    Allowed ids, the row's grammar mask, stop tokens below the least length, bias, penalties. Penalties count the committed
    output, and the drafted tokens up to the row's own.

    Args:
        logits: [T, V] fp32, contiguous.
        rows: of the step.
        table: `lengths` is read.
        rules: of each slot.
        row_masks: [T, W] int32 bit masks of grammars, or None; a row's own, since it depends on the drafted path.
        has_row_mask: [T] int32, 1 where the row has a mask; None where `row_masks` is.
    """
    for row, slot in enumerate(rows.slots.tolist()):
        if slot < 0:
            continue
        flags, values = int(rules.flags[slot]), logits[row]
        if flags & HAS_ALLOWED:
            values[~unpacked(rules.allowed[slot], len(values))] = -torch.inf
        if row_masks is not None and has_row_mask is not None and has_row_mask[row]:
            values[~unpacked(row_masks[row], len(values))] = -torch.inf
        if flags & HAS_MIN_LENGTH and rows.positions[row] + 1 < rules.min_length[slot]:
            values[_ids(rules.stop_ids[slot])] = -torch.inf
        if flags & HAS_BIAS:
            values[_ids(rules.bias_ids[slot])] += rules.bias_values[slot][rules.bias_ids[slot] >= 0]
        if flags & HAS_PENALTIES:
            _penalise(values, rules, slot, _path(row, rows, int(table.lengths[slot])))


def unpacked(mask: Tensor, vocab_size: int) -> Tensor:
    """A bit mask [W] int32 as [vocab_size] bool."""
    bits = mask[:, None] >> torch.arange(32, dtype=torch.int32, device=mask.device) & 1
    return bits.flatten()[:vocab_size].bool()


def _ids(padded: Tensor) -> Tensor:
    return padded[padded >= 0].long()


def _path(row: int, rows: StepRows, length: int) -> list[int]:
    """The drafted tokens up to the row's own."""
    found = []
    while row >= 0 and rows.positions[row] >= length:
        found.append(int(rows.tokens[row]))
        row = int(rows.parents[row])
    return found


def _penalise(values: Tensor, rules: RuleTable, slot: int, path: list[int]) -> None:
    counts = rules.counts[slot].float()
    for token_id in path:
        counts[token_id] += 1
    touched = unpacked(rules.in_prompt[slot], len(values)) | (counts > 0)
    repetition = rules.repetition[slot]
    scaled = torch.where(values > 0, values / repetition, values * repetition)
    scaled = scaled - rules.frequency[slot] * counts
    scaled = scaled - torch.where(counts > 0, rules.presence[slot], 0.0)
    values.copy_(torch.where(touched, scaled, values))
