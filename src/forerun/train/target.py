"""Loads the target that a head is trained for."""

from __future__ import annotations

import torch

from forerun.models.base import LoadedTarget
from forerun.models.config_file import eos_token_ids
from forerun.models.loader import load_model
from forerun.models.store import resolve_model


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
