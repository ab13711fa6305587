"""Writes all tokens of a draft in one forward pass (PARD, arXiv 2504.18583; P-EAGLE, arXiv 2602.01469)."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Listing
from dataclasses import replace

import torch
from torch import Tensor

from forerun.core.draft import NO_DRAFT, Draft
from forerun.drafters.base import TargetInfo
from forerun.drafters.choice import Choice
from forerun.drafters.passes import Line, Rows
from forerun.drafters.predictor import Predictor
from forerun.drafters.writers import ForwardPasses, chains_from
from forerun.errors import ConfigError
from forerun.models.mask import Mask


def check_parallel_drafting(value: object, *, draft_tree: object) -> None:
    """Raise `ConfigError` unless `parallel_drafting` is True or False, and if True, `draft_tree` is not given."""
    if not isinstance(value, bool):
        raise ConfigError(f"parallel_drafting: got {value!r}; may be True or False")
    if value and draft_tree is not None:
        raise ConfigError(
            "draft_tree: got one with parallel drafting, where no token knows which one it follows; leave it out"
        )


class ParallelWriter:
    """K tokens from one pass: the text's last token predicts the first, and each of K - 1 masks after it one more.

    A token's logits know nothing of those drafted before it; only the request's rules look at the path.
    """

    def __init__(self, choice: Choice, mask: Mask, *, num_tokens: int) -> None:
        self.num_places = num_tokens
        self._choice = choice
        self._mask = mask

    @classmethod
    def of(cls, target: TargetInfo, predictor: Predictor, mask: Mask, *, sample_method: str) -> ParallelWriter:
        """What writes drafts for `target` so with `predictor`."""
        choice = Choice(sample_method, vocab_size=target.vocab_size, target_ids=predictor.target_ids)
        return cls(choice, mask, num_tokens=target.num_speculative_tokens)

    def write(self, passes: ForwardPasses, lines: Listing[Line], features: Mapping[str, Tensor]) -> list[Draft]:
        """See `Writer`."""
        wanted = [line for line in lines if line.is_wanted]
        if not wanted:
            return [NO_DRAFT] * len(lines)
        rows = [self._masked(passes.read(line, features)) for line in wanted]
        logits = torch.split(passes.forward(rows).logits, [own.num_wanted for own in rows])
        drafts = iter(chains_from(self._choice, wanted, logits))
        return [next(drafts) if line.is_wanted else NO_DRAFT for line in lines]

    def _masked(self, rows: Rows) -> Rows:
        """Unread text with the masks behind it."""
        num_wanted = min(rows.line.max_tokens, rows.line.max_depth)
        states = rows.states
        if states is not None:
            assert self._mask.state is not None, "what reads states has one for masks"
            states = torch.cat([states, self._mask.state.expand(num_wanted - 1, -1)])
        token_ids = rows.token_ids + [self._mask.token_id] * (num_wanted - 1)
        return replace(rows, token_ids=token_ids, num_wanted=num_wanted, states=states)
