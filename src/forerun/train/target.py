"""The target that a head is trained for: it gives the features and the logits of batches of texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.batch import ForwardBatch, SequenceRows
from forerun.executor.host_copies import to_device
from forerun.kv.cache import KVCache
from forerun.models.base import LoadedTarget, TargetModel
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


def lay_out(
    model: TargetModel,
    texts: Sequence[Tensor],
    rows_each: Sequence[int],
    *,
    features: frozenset[str],
    logits_rows: Tensor,
) -> ForwardBatch:
    """Lay whole texts out for one pass, one after the other, each in blocks of its own from 0 on.

    Args:
        model: the target.
        texts: token ids of each, in CPU memory.
        rows_each: rows of each, at least as many as it has tokens; the rest is padded with token 0.
        features: hidden states that the pass returns.
        logits_rows: rows whose logits it returns, on the target's device.
    """
    num_blocks = [-(-num_rows // BLOCK_SIZE) for num_rows in rows_each]
    firsts = np.cumsum([0, *num_blocks])
    places = [torch.arange(num_rows, device="cpu") for num_rows in rows_each]
    padded = [F.pad(ids, (0, num_rows - len(ids))) for ids, num_rows in zip(texts, rows_each, strict=True)]
    slots = [int(firsts[index]) * BLOCK_SIZE + own for index, own in enumerate(places)]
    token_ids, positions, slot_mapping = (
        to_device(torch.cat(parts).numpy(), model.device) for parts in (padded, places, slots)
    )
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slot_mapping,
        sequences=[
            SequenceRows(
                num_context=0,
                num_rows=num_rows,
                block_ids=np.arange(firsts[index], firsts[index + 1], dtype=np.int32),
            )
            for index, num_rows in enumerate(rows_each)
        ],
        block_size=BLOCK_SIZE,
        logits_rows=logits_rows,
        features=features,
    )


@torch.no_grad()
def observe(target: LoadedTarget, texts: Sequence[Sequence[int]], features: frozenset[str]) -> Batch:
    """Run the target over texts, as the engine does, with a KV cache of their own."""
    model = target.model
    shape = len(texts), max(len(text) for text in texts)
    is_text = torch.zeros(shape, dtype=torch.bool)
    for row, text in enumerate(texts):
        is_text[row, : len(text)] = True
    batch = lay_out(
        model,
        [torch.tensor(text, device="cpu") for text in texts],
        [shape[1]] * len(texts),
        features=features,
        logits_rows=torch.arange(shape[0] * shape[1], device=model.device),
    )
    num_blocks = sum(len(one.block_ids) for one in batch.sequences)
    cache = KVCache(
        model.kv_specs, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=model.dtype, device=model.device
    )
    result = model.forward(batch, target.attention.begin(batch, cache))
    return Batch(
        token_ids=batch.token_ids.view(shape),
        is_text=is_text.to(model.device),
        features={name: rows.view(*shape, -1) for name, rows in result.features.items()},
        logits=result.logits.view(*shape, -1),
    )
