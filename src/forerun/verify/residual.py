"""The arithmetic of rejection: how likely a drafted token stands, and what it leaves of the target."""

from __future__ import annotations

import math

from torch import Tensor

from forerun.core.draft import Draft


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
    left[draft.token_ids[node]] = 0.0  # the bet was certain: the draft gave it everything
    return left
