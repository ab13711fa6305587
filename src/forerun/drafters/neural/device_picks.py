"""How a device picks the tokens of drafts after the texts in its table."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from forerun.drafters.base import DraftRequest
from forerun.drafters.neural.sampling import DraftSampler
from forerun.ops.cuda.table import RuleTable, StepRows


class DevicePicks:
    """Picks what a `DraftSampler` would: the likeliest tokens, or the first ones of the races that the target will run.

    Args:
        sampler: says which, and maps logits of a reduced vocabulary to tokens.
        rules: of the texts, which the races hang on.
        sample: `ops.cuda.sampling.sample`, or the kernel of that name.
    """

    def __init__(self, sampler: DraftSampler, rules: RuleTable, sample: Callable[..., None]) -> None:
        self._sampler = sampler
        self._rules = rules
        self._sample = sample

    def may_pick(self, request: DraftRequest) -> bool:
        """Whether it can for a request: where no rule changes logits, or that does not matter."""
        return self._sampler.may_draft_on_device(request)

    def tokens(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """The tokens [R] int32 after rows at `positions` [R] of the texts in `slots` [R], by their logits [R, V].

        Below 0, or of no meaning, where the slot is -1.
        """
        if self._sampler.takes_likeliest:
            return self._sampler.in_target(logits.argmax(-1)).int()
        token_ids, largest = torch.full_like(slots, -1), torch.empty_like(slots, dtype=torch.float32)
        wide, rows = self._sampler.spread(logits).contiguous(), _rows_at(slots, positions)
        self._sample(wide, rows, self._rules, token_ids, largest)
        return token_ids


class RankedPicks:
    """Picks several tokens at a row, the first one first: the likeliest, or those of the race that the target will run.

    Args:
        sampler: says which, and maps logits of a reduced vocabulary to tokens.
        rules: of the texts, which the races hang on.
        sample_first: that of `ops.cuda.sampling`, or the kernel of that name.
    """

    def __init__(self, sampler: DraftSampler, rules: RuleTable, sample_first: Callable[..., None]) -> None:
        self._sampler = sampler
        self._rules = rules
        self._sample_first = sample_first

    def tokens(self, logits: Tensor, slots: Tensor, positions: Tensor, *, count: int) -> Tensor:
        """The first `count` tokens [R, count] int32 after rows as those of `DevicePicks.tokens`; -1 where there are fewer."""
        likeliest = self._likeliest(logits, count)
        if self._sampler.takes_likeliest:
            return likeliest
        raced, rows = torch.full_like(likeliest, -1), _rows_at(slots, positions)
        self._sample_first(self._sampler.spread(logits).contiguous(), rows, self._rules, raced)
        is_greedy = self._rules.temperature[slots.clamp(min=0).long()] == 0
        return torch.where(is_greedy[:, None], likeliest, raced)

    def _likeliest(self, logits: Tensor, count: int) -> Tensor:
        found = logits.argmax(-1, keepdim=True) if count == 1 else logits.topk(min(count, logits.shape[1])).indices
        found = self._sampler.in_target(found)
        return pad(found.int(), (0, count - found.shape[1]), value=-1)


def _rows_at(slots: Tensor, positions: Tensor) -> StepRows:
    """Rows [R] of which these are known."""
    rows = StepRows.empty(len(slots), 0, longest_path=1, device=slots.device)
    rows.slots.copy_(slots)
    rows.positions.copy_(positions)
    return rows
