"""Writes all tokens of a draft in one forward pass (PARD, arXiv 2504.18583; P-EAGLE, arXiv 2602.01469)."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from forerun.core.draft import NO_DRAFT, Draft
from forerun.drafters.base import TargetInfo
from forerun.drafters.choice import Choice, Spot
from forerun.drafters.passes import Line, Rows
from forerun.drafters.predictor import Predictor
from forerun.drafters.writers import ForwardPasses
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


@dataclass(slots=True)
class _Parallel:
    """A line's draft on its way, and the logits [num_wanted, V] that it is chosen from."""

    line: Line
    logits: Tensor
    token_ids: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)

    def draft(self) -> Draft:
        return Draft(tuple(self.token_ids), None, torch.stack(self.probs) if self.probs else None)


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
        written = [_Parallel(line, own) for line, own in zip(wanted, logits, strict=True)]
        self._choose(written)
        drafts = iter(written)
        return [next(drafts).draft() if line.is_wanted else NO_DRAFT for line in lines]

    def _masked(self, rows: Rows) -> Rows:
        """Unread text with the masks behind it."""
        num_wanted = min(rows.line.max_tokens, rows.line.max_depth)
        states = rows.states
        if states is not None:
            assert self._mask.state is not None, "what reads states has one for masks"
            states = torch.cat([states, self._mask.state.expand(num_wanted - 1, -1)])
        token_ids = rows.token_ids + [self._mask.token_id] * (num_wanted - 1)
        return replace(rows, token_ids=token_ids, num_wanted=num_wanted, states=states)

    def _choose(self, written: Listing[_Parallel]) -> None:
        """Choose the tokens, first those of all lines, then all second ones ...; a line ends where its rules allow none."""
        depth, growing = 0, list(written)
        while growing:
            logits = torch.stack([one.logits[depth] for one in growing])
            spots = [Spot(one.line.request, tuple(one.token_ids), count=1, index=depth) for one in growing]
            for one, bets in zip(growing, self._choice.choose(logits, spots), strict=True):
                one.token_ids += bets.token_ids
                one.probs += bets.probs or []
            depth += 1
            growing = [one for one in growing if len(one.token_ids) == depth < len(one.logits)]
