"""Compares a head in training with the same head as it is stored, loaded and computed to draft: what is learnt must be what is served."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from forerun.core.batch import ForwardBatch, SequenceRows
from forerun.drafters.neural.forward import HeadPredictor
from forerun.errors import ConfigError
from forerun.kv.cache import KVCache
from forerun.models.base import LoadedTarget
from forerun.models.heads.eagle3 import load_eagle3
from forerun.train.eagle3_trainer import Eagle3Trainer
from forerun.train.observer import ObservedTexts
from forerun.train.selection import LearnedText
from forerun.train.target import BLOCK_SIZE

MOST_DISTANCE = 0.1
"""Half the sum of |p - q| over tokens, on average over places: roundings of bf16 give up to 0.02, a wrong layer 0.5 and more."""


def check_served_head(trainer: Eagle3Trainer, folder: Path, target: LoadedTarget, text: LearnedText) -> None:
    """Compute a text with the head in training and with the one that was stored of it.

    Args:
        trainer: of the head.
        folder: where it was stored just now.
        target: what it drafts for.
        text: at whose places both are compared.

    Raises:
        ConfigError: they give other probabilities.
    """
    observed = trainer.observe([text])
    expected, found = trainer.logits(observed), served_logits(folder, target, observed)
    distance = (found.softmax(-1) - expected.softmax(-1)).abs().sum(-1).mean().item() / 2
    if not distance <= MOST_DISTANCE:
        raise ConfigError(
            f"model: the engine's logits and the trainer's differ: on average {distance:.0%} of a head's probability lies on "
            f"other tokens when it drafts than in training, and at most {MOST_DISTANCE:.0%} may; nothing that is trained so "
            "would draft well; please report it, with what forerun collect-env says"
        )


@torch.no_grad()
def served_logits(folder: Path, target: LoadedTarget, observed: ObservedTexts) -> Tensor:
    """Compute the logits [N, V] of a stored head at the places of one observed text, as it computes them to draft."""
    predictor = HeadPredictor(load_eagle3(folder, target))
    token_ids = observed.token_ids[0]
    places = torch.arange(1, len(token_ids), device=token_ids.device)  # the first has no entry
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    batch = ForwardBatch(
        token_ids=token_ids[1:],
        positions=places,
        slot_mapping=places,
        sequences=[
            SequenceRows(
                num_context=1,
                num_rows=len(places),
                block_ids=np.arange(num_blocks, dtype=np.int32),
                num_hidden=predictor.num_hidden,
            )
        ],
        block_size=BLOCK_SIZE,
        logits_rows=observed.places - 1,
    )
    cache = KVCache(
        predictor.kv_specs,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        dtype=predictor.dtype,
        device=predictor.device,
    )
    states = predictor.read_states({name: rows[0] for name, rows in observed.features.items()}, places - 1)
    attend = target.attention_for(predictor.kv_specs).begin(batch, cache)
    return predictor.predict(batch, states, attend).logits
