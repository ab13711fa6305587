"""Rejection sampling over chains and trees: more accepted tokens where draft probabilities are known.

The fast twin of `reference` (arXiv 2211.17192; siblings as in SpecInfer, arXiv 2305.09781).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from forerun.core.draft import Draft
from forerun.verify.base import Verdict, Verifier
from forerun.verify.judging import Chance, IndependentVerifier, Target, probs_where_rules_hold
from forerun.verify.matching import is_settled_by_matching, match


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
        left = probs_where_rules_hold(target, place)
        if left is None:
            return Verdict(tuple(accepted[:-1]), draft.token_ids[place])
        for child in children[place + 1]:
            if chance.accepts(child, acceptance_ratio(left, draft, child)):
                accepted.append(child)
                break
            left = _after_rejection(left, draft, child)
        else:
            return Verdict(tuple(accepted), chance.token(left))


def acceptance_ratio(target_probs: Tensor, draft: Draft, node: int) -> float:
    """target / draft probability of the token at `node`; above 1 where the draft is too modest.

    `target_probs` [vocab_size] is what the target has left after the node's earlier siblings.
    """
    token_id = draft.token_ids[node]
    wanted = float(target_probs[token_id])
    drafted = 1.0 if draft.probs is None else float(draft.probs[node, token_id])
    if drafted == 0.0:  # underflow: the token was drawn all the same
        return math.inf if wanted > 0.0 else 0.0
    return wanted / drafted


def excess(target_probs: Tensor, draft: Draft, node: int) -> Tensor:
    """max(target - draft, 0), not normalised: [vocab_size]."""
    if draft.probs is not None:
        return (target_probs - draft.probs[node].to(target_probs.device)).clamp_(min=0.0)
    left = target_probs.clone()
    left[draft.token_ids[node]] = 0.0  # the draft gave this token probability 1
    return left


def _after_rejection(target_probs: Tensor, draft: Draft, node: int) -> Tensor:
    left = excess(target_probs, draft, node)
    total = left.sum()
    # Nothing is left only where target and draft are equal up to rounding: then any of it will do.
    return left / total if total > 0 else target_probs
