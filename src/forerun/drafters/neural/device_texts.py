"""What drafting on a device reads of the texts in its table; of padding, slots of -1, whatever is there."""

from __future__ import annotations

from torch import Tensor

from forerun.ops.cuda.table import DeviceTable


def lengths_of(table: DeviceTable, slots: Tensor) -> Tensor:
    """[N] int32, the tokens of the texts in `slots` [N]."""
    return table.lengths[slots.clamp(min=0).long()]


def last_tokens(table: DeviceTable, slots: Tensor, lengths: Tensor) -> Tensor:
    """[N] int64, the last token of each text."""
    return table.tokens[slots.clamp(min=0).long(), (lengths - 1).clamp(min=0).long()].long()


def kv_slots(table: DeviceTable, slots: Tensor, places: Tensor, *, block_size: int) -> Tensor:
    """Where in the target's cache the `places` [N, ...] of the texts in `slots` [N] lie: int64, of the places' shape."""
    places = places.clamp(min=0).long()
    own = slots.clamp(min=0).long().view(-1, *[1] * (places.ndim - 1))
    return table.block_table[own, places // block_size].long() * block_size + places % block_size
