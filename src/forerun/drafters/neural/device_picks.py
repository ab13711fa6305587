"""How a device picks the tokens of chains after the texts in its table."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

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
            found = logits.argmax(-1)
            return (found if self._sampler.target_ids is None else self._sampler.target_ids[found]).int()
        token_ids, largest = torch.full_like(slots, -1), torch.empty_like(slots, dtype=torch.float32)
        rows = StepRows.empty(len(slots), 0, longest_path=1, device=slots.device)
        rows.slots.copy_(slots)
        rows.positions.copy_(positions)
        self._sample(self._sampler.spread(logits).contiguous(), rows, self._rules, token_ids, largest)
        return token_ids
