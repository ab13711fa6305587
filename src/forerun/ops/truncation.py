"""Min-p, top-k and top-p: which tokens may still be sampled."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forerun.core.exact_math import Float32s, nucleus_weight, weights

TokenIds = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """Tokens that may come next.

    `token_ids` [n] ascending, or None for the whole vocabulary; `logits` [n] fp32, after
    temperature, the largest 0, some possibly -inf.
    """

    token_ids: TokenIds | None
    logits: Float32s

    def without_forbidden(self) -> KeptTokens:
        """These without the tokens at -inf."""
        if self.token_ids is not None:
            return self
        token_ids = (self.logits > -math.inf).nonzero()[0]
        return KeptTokens(token_ids, self.logits[token_ids])

    def spread(self, values: Float32s, *, vocab_size: int, fill: float) -> Float32s:
        """Put `values` [n] at these tokens' places in a row [vocab_size] of `fill`."""
        if self.token_ids is None:
            return values
        row = np.full(vocab_size, fill, dtype=np.float32)
        row[self.token_ids] = values
        return row


def truncate(logits: Float32s, *, min_p: float, top_k: int, top_p: float) -> KeptTokens:
    """Apply min-p, then top-k, then top-p, each over what the one before left (vLLM's order).

    Min-p (arXiv 2407.01082) drops tokens below `min_p` times the largest probability. Top-k keeps
    the k largest logits and all ties with the last of them. Top-p (arXiv 1904.09751) keeps the
    fewest most likely tokens whose probabilities reach `top_p`, ties by lowest token id; it adds up
    `exact_math.weights`. csrc/sampling.h keeps the very same tokens.

    Args:
        logits: [vocab_size] fp32 after temperature, the largest 0.
        min_p: 0 turns it off.
        top_k: 0, or the vocabulary size, turns it off.
        top_p: 1 turns it off.
    """
    floor = floor_of(min_p)
    if 0 < top_k < len(logits):
        floor = max(floor, _kth_largest(logits, top_k))
    kept = KeptTokens(None, logits) if floor == -math.inf else _select(logits, (logits >= floor).nonzero()[0])
    if top_p >= 1.0:
        return kept
    nucleus = _nucleus(kept.logits, top_p)
    return _select(logits, nucleus if kept.token_ids is None else kept.token_ids[nucleus])


def floor_of(min_p: float) -> float:
    """The least logit that min-p keeps, in fp32: where the largest is 0, exp(logit) is relative to the largest probability."""
    return float(np.float32(math.log(min_p))) if min_p > 0.0 else -math.inf


def _select(logits: Float32s, token_ids: TokenIds) -> KeptTokens:
    return KeptTokens(token_ids, logits[token_ids])


def _kth_largest(logits: Float32s, k: int) -> float:
    return float(-np.partition(-logits, k - 1)[k - 1])


def _nucleus(logits: Float32s, top_p: float) -> TokenIds:
    """Ascending indices of the fewest most likely tokens that reach `top_p` together."""
    weight = weights(logits)
    total = int(weight.sum())
    wanted = nucleus_weight(total, top_p)
    # All tokens that weigh no more than this weigh too little together to be needed.
    light = (total - wanted) // len(logits)
    likely = logits[logits >= logits[weight > light].min()]
    ordered = -np.sort(-likely)
    num_kept = 1 + int(np.searchsorted(weights(ordered).cumsum(), wanted))
    least = ordered[num_kept - 1]
    found = (logits >= least).nonzero()[0]
    is_least = logits[found] == least
    nucleus: TokenIds = found[~is_least | (is_least.cumsum() <= (ordered[:num_kept] == least).sum())]
    return nucleus
