"""The likeliest tokens of rows of logits, in torch: the twin of what the native kernels find while the head computes."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.core.batch import Candidates, CandidateTensors

ROWS_AT_ONCE = 32
"""Rows whose keys are there at once: they take nine times the memory of the logits."""


def find_candidates(logits: Tensor, num_candidates: int) -> Candidates:
    """Find the candidates of each row: [R, vocab_size] fp32 -> [R, num_candidates].

    `torch.topk` promises no order among equal values, so it is asked for the highest of keys that
    differ: the logit, as an integer of the same order, then the token id.

    Raises:
        ValueError: there are fewer logits than `num_candidates`.
    """
    vocab_size = logits.shape[1]
    if num_candidates > vocab_size:
        raise ValueError(f"{num_candidates} candidates of {vocab_size} logits; ask for at most as many as there are")
    last_first = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    found = torch.cat([_highest(rows, last_first, num_candidates) for rows in torch.split(logits, ROWS_AT_ONCE)])
    return CandidateTensors(found.int(), logits.gather(1, found))


def _highest(logits: Tensor, last_first: Tensor, count: int) -> Tensor:
    """[R, count] int64, the tokens of the highest logits, of equal ones the first."""
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0: they are equal
    ordered = torch.where(logits.isnan(), 2**31 - 1, bits ^ ((bits >> 31) & (2**31 - 1))).long()
    return (ordered * 2**32 + last_first).topk(count).indices
