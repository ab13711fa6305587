"""A drafter that exposes wrong verifiers: often wrong, with sibling tokens and known draft probabilities."""

from __future__ import annotations

import torch

from forerun.core.draft import Draft
from forerun.core.random_bits import Stream, uniform
from forerun.core.sequence import Sequence
from forerun.drafters.base import DraftContext, DraftRequest, TargetInfo


class AdversarialDrafter:
    """Drafts tokens that the request allows, sampled from a skewed distribution.

    Chains of sampled tokens and trees of two siblings with one child each take turns, from step to step and from
    seed to seed, so that samples of one prompt meet both after each of its tokens. The
    draft probabilities rise in the order of the allowed tokens, which are listed from the target's most
    to its least likely: a verifier with a wrong residual distribution fails most clearly on them.
    """

    needs: frozenset[str] = frozenset()

    def __init__(self, target: TargetInfo) -> None:
        self._vocab_size = target.vocab_size

    def start(self, sequence: Sequence) -> None:
        """Do nothing."""

    def stop(self, sequence: Sequence) -> None:
        """Do nothing."""

    def propose(self, context: DraftContext) -> list[Draft]:
        """Draft a sampled chain or tree for each request."""
        return [self._draft(request) for request in context.requests]

    def _draft(self, request: DraftRequest) -> Draft:
        sequence = request.sequence
        allowed = sequence.sampling.allowed_token_ids or list(range(min(8, self._vocab_size)))
        weights = torch.arange(1, len(allowed) + 1, dtype=torch.float64)
        odds = weights / weights.sum()
        parents: tuple[int, ...] = (-1, 0, 1) if (len(sequence) + sequence.seed) % 2 else (-1, -1, 0, 1)
        row = torch.zeros(self._vocab_size)
        row[allowed] = odds.float()
        draws = [uniform(sequence.seed, len(sequence), Stream.DRAFT, index=node) for node in range(len(parents))]
        places = torch.searchsorted(odds.cumsum(0), torch.tensor(draws, dtype=torch.float64))
        token_ids = [allowed[place] for place in places.clamp(max=len(allowed) - 1).tolist()]
        return Draft(tuple(token_ids), parents, row.repeat(len(parents), 1))
