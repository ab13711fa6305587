"""Loads a target model: a table row's decoder where there is one, else transformers' own code."""

from __future__ import annotations

from pathlib import Path

import torch

from forerun.models.base import TargetModel
from forerun.models.checkpoint import open_checkpoint
from forerun.models.config import HFConfig
from forerun.models.config_file import read_config, read_transformers_config
from forerun.models.decoder import build_decoder
from forerun.models.families import supports
from forerun.models.packing import Packing
from forerun.models.weights import Checkpoint


def load_dummy(
    path: Path, *, dtype: torch.dtype | None, device: torch.device, packing: Packing | None = None
) -> TargetModel:
    """Give a model's configuration seeded random weights; its weight files, if any, are not looked at.

    Args:
        path: the folder or .gguf file.
        dtype: of weights, activations and KV; None: the configuration's, bfloat16 where it names none.
        device: where it computes.
        packing: hands the weights to the native kernels; None: torch computes.

    Raises:
        ModelError: path, configuration or architecture cannot be used.
    """
    from forerun.models.dummy import DummyCheckpoint  # here, for it takes 120 MB of transformers' own code

    config = read_transformers_config(path)
    named = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
    checkpoint = DummyCheckpoint(config, dtype=dtype or named)
    return build_decoder(config, checkpoint, dtype=dtype or named, device=device, packing=packing)


def load_model(
    path: Path, *, dtype: torch.dtype | None, device: torch.device, packing: Packing | None = None
) -> TargetModel:
    """Load the model in a Hugging Face folder or a .gguf file.

    Args:
        path: the folder or file.
        dtype: of weights, activations and KV; None: as in the checkpoint.
        device: where it computes.
        packing: hands the weights to the native kernels; None: torch computes.

    Raises:
        ModelError: path, configuration, weights or architecture cannot be used.
    """
    config = read_config(path)
    if not supports(config):
        from forerun.models.fallback import load_fallback  # here, for it takes 120 MB of transformers' own code

        return load_fallback(path, config, dtype=dtype, device=device, packing=packing)
    checkpoint = open_checkpoint(path)
    dtype = dtype or _stored_dtype(config, checkpoint)
    return build_decoder(config, checkpoint, dtype=dtype, device=device, packing=packing)


def _stored_dtype(config: HFConfig, checkpoint: Checkpoint) -> torch.dtype:
    """The dtype that the configuration names, else the one of the weights."""
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    return checkpoint.load(min(checkpoint.names())).dtype
