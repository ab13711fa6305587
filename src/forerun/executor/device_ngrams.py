"""N-gram drafts that the device makes of the texts in its table, right after it has committed to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.drafters.base import Drafter, LooksUpNgrams, NgramLookup
from forerun.ops.cuda.table import DeviceTable, RuleTable


class AskedDrafts(NamedTuple):
    """For which sequences of a step the device is to draft, and how much: N integers each."""

    slots: Tensor  # -1: nothing for this one
    limits: Tensor  # tokens of the draft, at most

    def rooms(self, table: DeviceTable, rules: RuleTable) -> Tensor:
        """[N] int32: the limits, where the texts have room for so many tokens; 0 for texts that have ended."""
        at = self.slots.clamp(min=0).long()
        room = rules.max_length[at] - table.lengths[at] - 1  # one place is the target's own token's
        return torch.minimum(self.limits, room).clamp(min=0) * (1 - table.ended[at])

    def drafts(self, table: DeviceTable) -> Tensor:
        """[N, 1 + 2 * K] int32: how many tokens were drafted, the tokens, and their parents; what is behind them means nothing."""
        at = self.slots.clamp(min=0).long()
        sizes = torch.where(self.slots < 0, 0, table.draft_sizes[at])
        return torch.cat([sizes[:, None], table.draft_tokens[at], table.draft_parents[at]], dim=1)


class DeviceNgrams:
    """Drafts on the device what a drafter that only looks up n-grams would.

    Args:
        lookup: which n-grams, and how far a match is trusted.
        table: of the texts; drafts are written there.
        rules: say how long the texts may be.
        propose: `ops.cuda.ngram.propose`, or the kernel of that name.
    """

    def __init__(self, lookup: NgramLookup, table: DeviceTable, rules: RuleTable, propose: Callable[..., None]) -> None:
        self._lengths = {"shortest": lookup.shortest, "longest": lookup.longest}
        self._draft_lengths = torch.tensor(lookup.draft_lengths, dtype=torch.int32, device=table.tokens.device)
        self._table = table
        self._rules = rules
        self._propose = propose

    @classmethod
    def of(
        cls, drafter: Drafter, table: DeviceTable, rules: RuleTable, propose: Callable[..., None]
    ) -> DeviceNgrams | None:
        """None where another drafter drafts."""
        return cls(drafter.ngram_lookup, table, rules, propose) if isinstance(drafter, LooksUpNgrams) else None

    def propose(self, asked: AskedDrafts) -> None:
        """Draft into the table."""
        rooms = asked.rooms(self._table, self._rules)
        self._propose(self._table, asked.slots, rooms, self._draft_lengths, **self._lengths)
