"""What heads learn by: functions of a head and a batch, one for each way to train."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.models.heads.base import DraftHead
from forerun.train.attention import UnrolledAttention
from forerun.train.batches import Batch


def unrolled(head: DraftHead, batch: Batch, *, num_passes: int, decay: float) -> Tensor:
    """EAGLE-3's training-time test (arXiv 2503.01840): `num_passes` tokens are drafted from every place.

    Each pass goes on from the states of the one before, but reads the text's own tokens. Pass n, from 0,
    counts decay^n.
    """
    attend = UnrolledAttention(len(batch.token_ids))
    states = _fused(head, batch)
    loss = states.new_zeros(())
    for index in range(min(num_passes, batch.token_ids.shape[1] - 1)):
        outputs = _outputs(head, batch, states[:, :-1], attend, index)
        loss = loss + decay**index * _cross_entropy(head, batch, outputs, first=1 + index)
        states = head.states(outputs.flatten(0, 1)).view(*outputs.shape[:2], -1)
    return loss


def feature_regression(head: DraftHead, batch: Batch, *, token_weight: float) -> Tensor:
    """EAGLE-1's (arXiv 2401.15077): what comes out shall be the target's next state, and give its next token."""
    states = _fused(head, batch)
    outputs = _outputs(head, batch, states[:, :-1], UnrolledAttention(len(states)), 0)
    distance = F.smooth_l1_loss(outputs.float(), states[:, 1:].detach().float(), reduction="none").mean(-1)
    return _mean(distance, batch.is_text[:, 1:]) + token_weight * _cross_entropy(head, batch, outputs, first=1)


def _fused(head: DraftHead, batch: Batch) -> Tensor:
    """The states of the text's tokens, [B, S, width]."""
    fused = head.fuse([batch.features[name].flatten(0, 1) for name in head.needs])
    return fused.view(*batch.token_ids.shape, -1)


def _outputs(head: DraftHead, batch: Batch, states: Tensor, attend: UnrolledAttention, index: int) -> Tensor:
    """Pass `index` over states [B, R, width] -> [B, R, hidden_size]: row r reads token r + 1 + index."""
    num_texts, num_rows = states.shape[:2]
    token_ids = batch.token_ids[:, 1 + index : 1 + index + num_rows]
    positions = torch.arange(index, index + num_rows, device=token_ids.device).repeat(num_texts)
    outputs = head.forward(token_ids.flatten(), states.flatten(0, 1), positions, attend)
    return outputs.view(num_texts, num_rows, -1)


def _cross_entropy(head: DraftHead, batch: Batch, outputs: Tensor, *, first: int) -> Tensor:
    """Between the head's next token at rows [B, R] and the target's at places `first` and on.

    Where a head drafts part of the vocabulary it learns the target's probabilities of that part, and nothing
    where the target's own choice lies outside.
    """
    places = slice(first, first + outputs.shape[1])
    wanted, is_learned = batch.logits[:, places], batch.is_text[:, places]
    if head.target_ids is not None:
        is_learned = is_learned & torch.isin(wanted.argmax(-1), head.target_ids)
        wanted = wanted[..., head.target_ids]
    logits = head.logits(outputs.flatten(0, 1)).view(wanted.shape)
    cross_entropy = -(wanted.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    return _mean(cross_entropy, is_learned)


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    """Of the values [B, R] where `counted` [B, R] says so; 0 where there are none."""
    return (values * counted).sum() / counted.sum().clamp(min=1)
