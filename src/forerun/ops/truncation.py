"""Min-p, top-k and top-p: which tokens may still be sampled."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens that may come next.

    `token_ids` [n] ascending, or None for the whole vocabulary; `logits` [n] fp32, after
    temperature, the largest 0, some possibly -inf.
    """

    token_ids: Tensor | None
    logits: Tensor

    def without_forbidden(self) -> Candidates:
        """These without the tokens at -inf."""
        if self.token_ids is not None:
            return self
        token_ids = (self.logits > -math.inf).nonzero().flatten()
        return Candidates(token_ids, self.logits[token_ids])

    def spread(self, values: Tensor, *, vocab_size: int, fill: float) -> Tensor:
        """Put `values` [n] at the candidates' places in a row [vocab_size] of `fill`."""
        if self.token_ids is None:
            return values
        return values.new_full((vocab_size,), fill).scatter_(0, self.token_ids, values)


def truncate(logits: Tensor, *, min_p: float, top_k: int, top_p: float) -> Candidates:
    """Apply min-p, then top-k, then top-p, each over what the one before left (vLLM's order).

    Min-p (arXiv 2407.01082) drops tokens below `min_p` times the largest probability. Top-k keeps
    the k largest logits and all ties with the last of them. Top-p (arXiv 1904.09751) keeps the
    fewest most likely tokens whose probabilities reach `top_p`, ties by lowest token id.

    Args:
        logits: [vocab_size] fp32 after temperature, the largest 0.
        min_p: 0 turns it off.
        top_k: 0, or the vocabulary size, turns it off.
        top_p: 1 turns it off.
    """
    # With the largest logit 0, a probability relative to the largest is exp(logit).
    floor = math.log(min_p) if min_p > 0.0 else -math.inf
    if 0 < top_k < len(logits):
        floor = max(floor, _kth_largest(logits, top_k))
    kept = Candidates(None, logits) if floor == -math.inf else _select(logits, (logits >= floor).nonzero().flatten())
    if top_p >= 1.0:
        return kept
    nucleus = _nucleus(kept.logits, top_p)
    return _select(logits, nucleus if kept.token_ids is None else kept.token_ids[nucleus])


def _select(logits: Tensor, token_ids: Tensor) -> Candidates:
    return Candidates(token_ids, logits[token_ids])


def _kth_largest(logits: Tensor, k: int) -> float:
    return float(logits.topk(k).values[-1])


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Ascending indices of the fewest most likely tokens that reach `top_p` together."""
    ordered = _descending(logits)
    total_so_far = ordered.double().exp().cumsum(0)
    reached = total_so_far / total_so_far[-1]
    num_kept = 1 + int((reached[:-1] < top_p).sum())
    least = ordered[num_kept - 1]
    found = (logits >= least).nonzero().flatten()
    is_least = logits[found] == least
    return found[~is_least | (is_least.cumsum(0) <= (ordered[:num_kept] == least).sum())]


def _descending(logits: Tensor) -> Tensor:
    # On CPU NumPy's sort is an order of magnitude faster than torch's.
    if logits.is_cpu:
        return torch.from_numpy(-np.sort(-logits.detach().numpy()))
    return logits.sort(descending=True).values
