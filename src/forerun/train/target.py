"""The target that a head is trained for: it gives the features and the logits of batches of texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.core.batch import ForwardBatch, SequenceRows
from forerun.kv.cache import KVCache
from forerun.models.base import LoadedTarget
from forerun.models.config_file import eos_token_ids
from forerun.models.loader import load_model
from forerun.models.store import resolve_model

BLOCK_SIZE = 16


def load_for_training(model: str, *, dtype: torch.dtype | None = None, device: str = "cpu") -> LoadedTarget:
    """Load a target on torch's operations, which have gradients, in contrast to the native kernels.

    Args:
        model: a known name, a folder, a .gguf file or a hub id.
        dtype: of the weights, or None for the checkpoint's.
        device: where the target runs.

    Raises:
        ModelError: the model cannot be loaded.
    """
    path = resolve_model(model)
    return LoadedTarget(
        model=load_model(path, dtype=dtype, device=torch.device(device)),
        tokenizer=None,
        eos_token_ids=eos_token_ids(path),
        path=path,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """B texts of up to S tokens, with the target's features at each token and its logits of the next one.

    Shorter texts are padded at the end; `is_text` is False for padding.
    """

    token_ids: Tensor  # [B, S] int64
    is_text: Tensor  # [B, S] bool
    features: dict[str, Tensor]  # name -> [B, S, hidden_size of the target]
    logits: Tensor  # [B, S, vocab_size] fp32


@torch.no_grad()
def observe(target: LoadedTarget, texts: Sequence[Sequence[int]], features: frozenset[str]) -> Batch:
    """Run the target over texts, as the engine does, with a KV cache of their own."""
    model = target.model
    length = max(len(text) for text in texts)
    token_ids = torch.zeros(len(texts), length, dtype=torch.int64)
    is_text = torch.zeros(len(texts), length, dtype=torch.bool)
    for row, text in enumerate(texts):
        token_ids[row, : len(text)] = torch.tensor(text)
        is_text[row, : len(text)] = True
    blocks_each = -(-length // BLOCK_SIZE)
    tables = np.arange(len(texts) * blocks_each, dtype=np.int32).reshape(len(texts), blocks_each)
    places = torch.arange(length)
    first_slots = torch.arange(len(texts)) * blocks_each * BLOCK_SIZE
    batch = ForwardBatch(
        token_ids=token_ids.flatten().to(model.device),
        positions=places.repeat(len(texts)).to(model.device),
        slot_mapping=(first_slots[:, None] + places).flatten().to(model.device),
        sequences=[SequenceRows(num_context=0, num_rows=length, block_ids=table) for table in tables],
        block_size=BLOCK_SIZE,
        logits_rows=torch.arange(token_ids.numel(), device=model.device),
        features=features,
    )
    cache = KVCache(
        model.kv_specs, num_blocks=tables.size, block_size=BLOCK_SIZE, dtype=model.dtype, device=model.device
    )
    result = model.forward(batch, target.attention.begin(batch, cache))
    return Batch(
        token_ids=token_ids.to(model.device),
        is_text=is_text.to(model.device),
        features={name: rows.view(*token_ids.shape, -1) for name, rows in result.features.items()},
        logits=result.logits.view(*token_ids.shape, -1),
    )
