"""Heads for the tiny chat model, as `forerun train` leaves them."""

from __future__ import annotations

import torch

from forerun.train.copied_block import begin_from_block
from forerun.train.packaging import save_head
from tests.train.target_folder import chat_model, chat_model_folder


def save_trained_head(folder, *, seed, draft_ids=None):
    """Save one; seeds give different ones. Returns the folder."""
    ids = torch.arange(0, 264, 2) if draft_ids is None else draft_ids
    content, tensors = begin_from_block(chat_model(), ids, seed=seed)
    tensors = dict(tensors)
    source = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[name] = tensor + 0.01 * torch.randn(tensor.shape, generator=source)
    save_head(folder, content, tensors, layout="specforge", target=chat_model_folder(), stored_as="int8")
    return folder
