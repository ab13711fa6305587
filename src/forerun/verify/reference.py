"""Recursive rejection sampling in plain Python: the oracle that tests compare the fast verifiers with.

Speculative sampling (arXiv 2211.17192, 2302.01318), applied to each sibling in turn (SpecInfer,
arXiv 2305.09781).
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.core.draft import Draft
from forerun.verify.base import Verdict
from forerun.verify.judging import Chance, Target


def judge_by_the_book(draft: Draft, target: Target, chance: Chance) -> Verdict:
    """Judge a draft so that the output is distributed exactly as the target's.

    Each child of a place is accepted with min(1, target / draft). A rejected child leaves the
    target's residual, norm(max(target - draft, 0)), to its next sibling; after the last sibling the
    recovered token is drawn from it. Where nothing was drafted, it is the bonus token.
    """
    accepted: list[int] = []
    place = -1
    while True:
        left = target.probs(place).tolist()
        for child in draft.children()[place + 1]:
            drafted = draft_distribution(draft, child, vocab_size=len(left))
            token_id = draft.token_ids[child]
            if chance.accepts(child, min(1.0, left[token_id] / drafted[token_id])):
                accepted.append(child)
                place = child
                break
            left = normalised([max(t - d, 0.0) for t, d in zip(left, drafted, strict=True)])
        else:
            return Verdict(tuple(accepted), chance.token(target.probs(place).new_tensor(left)))


def draft_distribution(draft: Draft, node: int, *, vocab_size: int) -> list[float]:
    """The distribution that `node` was drawn from; one-hot where the draft has no probabilities."""
    if draft.probs is not None:
        values: list[float] = draft.probs[node].tolist()
        return values
    return [float(token_id == draft.token_ids[node]) for token_id in range(vocab_size)]


def normalised(weights: Sequence[float]) -> list[float]:
    """`weights` over their sum; all zero stays all zero (only a certain acceptance leaves nothing)."""
    total = sum(weights)
    return [w / total for w in weights] if total else list(weights)
