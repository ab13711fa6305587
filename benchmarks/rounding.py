"""Loads a model with weights rounded to int8 by groups and computed in fp32, to measure the gain of a group size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.targets import llm_on
from forerun import LLM
from forerun.build import choose_arithmetic
from forerun.config.settings import EngineSettings
from forerun.models.checkpoint import Checkpoint, dense, open_checkpoint
from forerun.models.config_file import read_config
from forerun.models.decoder import build_decoder
from forerun.models.store import resolve_model
from forerun.ops.native.formats.int8 import quantize


class RoundedCheckpoint:
    """A checkpoint whose matrices are rounded when they are read, including the embedding, which is also the head."""

    def __init__(self, checkpoint: Checkpoint, group_size: int) -> None:
        self._checkpoint = checkpoint
        self.facts = replace(checkpoint.facts, is_mixed=False)
        self._group_size = group_size

    def names(self) -> frozenset[str]:
        return self._checkpoint.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(name)

    def load(self, name: str) -> Tensor:
        tensor = dense(self._checkpoint.load(name))
        return round_by_group(tensor, self._group_size) if tensor.ndim == 2 else tensor


def round_by_group(weight: Tensor, group_size: int) -> Tensor:
    """Round [outputs, inputs] to 8 bits with a scale per output and `group_size` inputs; returns the values in fp32."""
    groups = torch.split(weight.float(), group_size, dim=1)
    return torch.cat([values.float() * scale[:, None] for values, scale in map(quantize, groups)], dim=1)


def load_rounded(model: str, *, group_size: int, settings: Mapping[str, Any]) -> LLM:
    """Load the model with its matrices rounded by groups."""
    path, device = resolve_model(model), torch.device("cpu")
    engine_settings = EngineSettings(model=model, dtype="float32", device="cpu", **settings)
    _, packing = choose_arithmetic(engine_settings, device, stored_dtype=None)
    checkpoint = RoundedCheckpoint(open_checkpoint(path), group_size)
    decoder = build_decoder(read_config(path), checkpoint, dtype=torch.float32, device=device, packing=packing)
    return llm_on(decoder, engine_settings, None if packing is None else packing.kernels)
