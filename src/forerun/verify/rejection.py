"""Rejection sampling over chains and trees: more accepted tokens where draft probabilities are known.

The fast twin of `reference` (arXiv 2211.17192; siblings as in SpecInfer, arXiv 2305.09781).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from forerun.core.draft import Draft
from forerun.core.verdict import Verdict
from forerun.verify.base import Verifier
from forerun.verify.judging import Chance, IndependentVerifier, Target
from forerun.verify.matching import is_settled_by_matching, match
from forerun.verify.residual import acceptance_ratio, excess


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectionConfig:
    """`rejection_sample_method: "standard"`, vLLM's word for rejection sampling; it has no settings."""

    def build(self, _num_speculative_tokens: int, /) -> Verifier:
        """Make the verifier; drafts may have any size."""
        return IndependentVerifier(reject, is_lossless=True)


def reject(draft: Draft, target: Target, chance: Chance) -> Verdict:
    """Walk down from the root while chance accepts some child, then draw from what the target has left."""
    if is_settled_by_matching(draft, target):
        return match(draft, target)
    children = draft.children()
    accepted: list[int] = []
    while True:
        place = accepted[-1] if accepted else -1
        left = target.probs(place)
        for child in children[place + 1]:
            if chance.accepts(child, acceptance_ratio(left, draft, child)):
                accepted.append(child)
                break
            left = _after_rejection(left, draft, child)
        else:
            return Verdict(tuple(accepted), chance.token(left))


def _after_rejection(target_probs: Tensor, draft: Draft, node: int) -> Tensor:
    left = excess(target_probs, draft, node)
    total = left.sum()
    # Nothing is left only where target and draft are equal up to rounding: then any of it will do.
    return left / total if total > 0 else target_probs
