"""The training losses: functions of a module that drafts and a batch, named after the method or the way of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kv.cache import LayerKV
from forerun.models.base import DraftHead, MaskToken
from forerun.models.decoder import Decoder
from forerun.models.heads.dflash import DFlashHead
from forerun.models.heads.eagle3 import PEagleHead
from forerun.models.heads.medusa import MedusaHeads
from forerun.models.heads.mlp_speculator import MLPSpeculator
from forerun.ops.attention import Attend
from forerun.train.attention import BlockAttention, UnrolledAttention
from forerun.train.target import Batch


def unrolled_loss(head: DraftHead, batch: Batch, *, num_passes: int, decay: float) -> Tensor:
    """EAGLE-3's training-time test (arXiv 2503.01840): `num_passes` tokens are drafted from every position.

    Each pass reads the states of the pass before it, but the text's own tokens. Pass n, counted from 0, has
    weight decay^n.
    """
    attend = UnrolledAttention(len(batch.token_ids))
    states = _fused(head, batch)
    loss = states.new_zeros(())
    for index in range(min(num_passes, batch.token_ids.shape[1] - 1)):
        outputs = _outputs(head, batch, states[:, :-1], attend, index)
        loss = loss + decay**index * _cross_entropy(head, batch, outputs, first=1 + index)
        states = head.states(outputs.flatten(0, 1)).view(*outputs.shape[:2], -1)
    return loss


def eagle_loss(head: DraftHead, batch: Batch, *, token_weight: float) -> Tensor:
    """EAGLE-1 (arXiv 2401.15077): the outputs are trained towards the target's next state and its next token."""
    states = _fused(head, batch)
    outputs = _outputs(head, batch, states[:, :-1], UnrolledAttention(len(states)), 0)
    distance = F.smooth_l1_loss(outputs.float(), states[:, 1:].detach().float(), reduction="none").mean(-1)
    return _mean(distance, batch.is_text[:, 1:]) + token_weight * _cross_entropy(head, batch, outputs, first=1)


def peagle_loss(head: PEagleHead, batch: Batch, *, num_tokens: int) -> Tensor:
    """P-EAGLE (arXiv 2602.01469): one pass drafts `num_tokens` after every position, from masks after the first."""
    attend = UnrolledAttention(len(batch.token_ids))
    states, mask = _fused(head, batch)[:, :-1], head.mask
    assert mask.state is not None, "a head's mask has a state"
    loss = states.new_zeros(())
    for index in range(min(num_tokens, batch.token_ids.shape[1] - 1)):
        if index:
            states = mask.state.expand(*states[:, :-1].shape)
        outputs = _outputs(head, batch, states, attend, index, token_id=mask.token_id if index else None)
        loss = loss + _cross_entropy(head, batch, outputs, first=1 + index)
    return loss


@dataclass(frozen=True, slots=True, kw_only=True)
class PardModel:
    """A draft model in training for `pard_loss`: a decoder with a mask token, which reads none of the target's features."""

    model: Decoder
    mask: MaskToken
    needs: ClassVar[tuple[str, ...]] = ()

    def logits(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Compute the logits of the token after each row: token ids [T], positions [T] -> [T, vocab_size]."""
        model = self.model
        hidden = model.layers(model.embed(token_ids), model.rotations(positions), attend, 0, model.num_layers)
        return model.logits(model.norm(hidden))


def pard_loss(drafter: PardModel, batch: Batch, *, num_tokens: int) -> Tensor:
    """PARD (arXiv 2504.18583): one pass drafts `num_tokens` after every position, from masks after the first."""
    num_texts, length = batch.token_ids.shape
    attend, loss = UnrolledAttention(num_texts), batch.logits.new_zeros(())
    for index in range(min(num_tokens, length)):
        token_ids = batch.token_ids[:, : length - index]
        if index:
            token_ids = torch.full_like(token_ids, drafter.mask.token_id)
        positions = torch.arange(index, length, device=token_ids.device).repeat(num_texts)
        logits = drafter.logits(token_ids.flatten(), positions, attend).view(*token_ids.shape, -1)
        loss = loss + _soft_cross_entropy(logits, batch, None, first=index)
    return loss


def medusa_loss(heads: MedusaHeads, batch: Batch) -> Tensor:
    """Medusa (arXiv 2401.10774): from every position head i predicts the token at depth i + 1 of a draft."""
    hidden = batch.features["last_hidden"]
    loss = hidden.new_zeros(())
    for index, logits in enumerate(heads.logits(hidden.flatten(0, 1), count=heads.num_heads)):
        outputs = logits.view(*hidden.shape[:2], -1)[:, : -1 - index]
        loss = loss + _soft_cross_entropy(outputs, batch, heads.target_ids, first=1 + index)
    return loss


def mlp_speculator_loss(speculator: MLPSpeculator, batch: Batch) -> Tensor:
    """MLP speculator (arXiv 2404.19124): from every position each step predicts a token, fed with the text's own."""
    hidden = batch.features["last_hidden"]
    states, loss = speculator.begin(hidden), hidden.new_zeros(())
    for index in range(min(speculator.num_steps, batch.token_ids.shape[1] - 1)):
        states = states[:, :-1]
        read = batch.token_ids[:, 1 + index :]
        logits, flat = speculator.step(index, read.flatten(), states.flatten(0, 1))
        states = flat.view(*read.shape, -1)
        loss = loss + _soft_cross_entropy(logits.view(*read.shape, -1), batch, None, first=1 + index)
    return loss


def dflash_loss(head: DFlashHead, batch: Batch) -> Tensor:
    """DFlash (arXiv 2602.06036): a block is filled in after every position that a whole block fits behind."""
    num_texts, length = batch.token_ids.shape
    size = head.flags.block_size
    num_blocks = length - size
    places = torch.arange(length, device=batch.token_ids.device)
    features = [batch.features[name].flatten(0, 1) for name in head.needs]
    context = [
        LayerKV(
            kv.key.view(num_texts, length, *kv.key.shape[1:]), kv.value.view(num_texts, length, *kv.value.shape[1:])
        )
        for kv in head.context(features, places.repeat(num_texts))
    ]
    attend = BlockAttention(context, num_blocks=num_blocks)
    token_ids = torch.full((num_texts, num_blocks, size), head.flags.mask_token_id, device=places.device)
    token_ids[:, :, 0] = batch.token_ids[:, 1 : 1 + num_blocks]
    positions = (1 + places[:num_blocks, None] + places[:size]).expand(num_texts, -1, -1)
    outputs = head.forward(token_ids.flatten(), positions.flatten(), attend, attend)
    logits = head.logits(outputs).view(num_texts, num_blocks, size, -1)
    loss = logits.new_zeros(())
    for row in range(1, size):  # the mask at position p predicts p's token, as the target's logits at p - 1 do
        loss = loss + _soft_cross_entropy(logits[:, :, row], batch, head.target_ids, first=row)
    return loss


def _fused(head: DraftHead, batch: Batch) -> Tensor:
    """Fuse the target's features to the head's input states: [B, S, width]."""
    fused = head.fuse([batch.features[name].flatten(0, 1) for name in head.needs])
    return fused.view(*batch.token_ids.shape, -1)


def _outputs(
    head: DraftHead,
    batch: Batch,
    states: Tensor,
    attend: UnrolledAttention,
    index: int,
    *,
    token_id: int | None = None,
) -> Tensor:
    """Run pass `index` over states [B, R, width] -> [B, R, hidden_size]; row r reads token r + 1 + index, or `token_id`."""
    num_texts, num_rows = states.shape[:2]
    token_ids = batch.token_ids[:, 1 + index : 1 + index + num_rows]
    if token_id is not None:
        token_ids = torch.full_like(token_ids, token_id)
    positions = torch.arange(index, index + num_rows, device=token_ids.device).repeat(num_texts)
    outputs = head.forward(token_ids.flatten(), states.flatten(0, 1), positions, attend)
    return outputs.view(num_texts, num_rows, -1)


def _cross_entropy(head: DraftHead, batch: Batch, outputs: Tensor, *, first: int) -> Tensor:
    """Compute the cross-entropy of the head's logits for outputs [B, R, hidden_size] with the target's from position `first` on."""
    logits = head.logits(outputs.flatten(0, 1)).view(*outputs.shape[:2], -1)
    return _soft_cross_entropy(logits, batch, head.target_ids, first=first)


def _soft_cross_entropy(logits: Tensor, batch: Batch, target_ids: Tensor | None, *, first: int) -> Tensor:
    """Compute the cross-entropy of logits [B, R, V] with the target's probabilities from position `first` on.

    A head that drafts a part of the vocabulary, `target_ids`, learns the target's probabilities within that
    part; positions where the target's most likely token lies outside are left out.
    """
    places = slice(first, first + logits.shape[1])
    wanted, is_learned = batch.logits[:, places], batch.is_text[:, places]
    if target_ids is not None:
        is_learned = is_learned & torch.isin(wanted.argmax(-1), target_ids)
        wanted = wanted[..., target_ids]
    return _mean(-(wanted.softmax(-1) * logits.log_softmax(-1)).sum(-1), is_learned)


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    """Return the mean of values [B, R] where `counted` [B, R] is True; 0 without any."""
    return (values * counted).sum() / counted.sum().clamp(min=1)
