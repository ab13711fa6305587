"""Drafts by a smaller model (arXiv 2211.17192, 2302.01318), of the same vocabulary or of another (2502.05202)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forerun.drafters.autoregressive import Autoregressive, Wording
from forerun.drafters.base import Drafter, TargetInfo
from forerun.drafters.draft_vocabulary import with_vocabulary_of
from forerun.drafters.predictor import ModelPredictor
from forerun.errors import ConfigError
from forerun.models.base import TargetModel
from forerun.models.loaded import LoadedTarget
from forerun.models.loader import load_model
from forerun.models.packing import Packing
from forerun.models.store import resolve_model

QUANTIZATIONS = (None, "int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelConfig:
    """vLLM's keys: which model drafts, in which weights, how its tokens are chosen (`Wording`), and how far it may go.

    `use_heterogeneous_vocab` lets its tokenizer be another than the target's.

    Raises:
        ConfigError: a value is out of range.
    """

    model: str
    quantization: str | None = None
    draft_sample_method: str = "greedy"
    draft_tree: Any = None
    max_model_len: int | None = None
    use_heterogeneous_vocab: bool = False

    def __post_init__(self) -> None:
        Wording.parse(self.draft_sample_method, self.draft_tree)
        if self.quantization not in QUANTIZATIONS:
            raise ConfigError(f"quantization (of the drafter): got {self.quantization!r}; may be None or 'int8'")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise ConfigError(f"max_model_len (of the drafter): got {self.max_model_len}; must be 1 or more")
        if not isinstance(self.use_heterogeneous_vocab, bool):
            raise ConfigError(f"use_heterogeneous_vocab: got {self.use_heterogeneous_vocab!r}; may be True or False")

    @property
    def wording(self) -> Wording:
        """How tokens are chosen."""
        return Wording.parse(self.draft_sample_method, self.draft_tree)

    @property
    def default_num_speculative_tokens(self) -> int | None:
        """The size of a static tree; of other drafts the user must say how many."""
        return self.wording.default_num_tokens

    def build(self, target: TargetInfo) -> Drafter:
        """Load the model.

        Raises:
            ConfigError: its vocabulary is not the target's and cannot or may not be translated, or
                `max_model_len` is above what it was made for.
            ModelError: it cannot be loaded.
        """
        path = resolve_model(str(self.model))
        model = with_vocabulary_of(
            target.itself,
            load_beside(target.itself, path, quantization=self.quantization),
            path,
            use_heterogeneous_vocab=self.use_heterogeneous_vocab,
        )
        if self.max_model_len is not None and self.max_model_len > model.max_model_len:
            raise ConfigError(
                f"max_model_len (of the drafter): got {self.max_model_len}; the draft model allows at most "
                f"{model.max_model_len}; lower it"
            )
        predictor = ModelPredictor(model)
        writer = self.wording.writer(target, predictor)
        return Autoregressive(predictor, target, writer, max_model_len=self.max_model_len or model.max_model_len)


def load_beside(target: LoadedTarget, path: Path, *, quantization: str | None) -> TargetModel:
    """Load a drafter's model on the target's device, in its dtype and on its kernels.

    Raises:
        ConfigError: int8 is asked for where there are no native kernels.
        ModelError: it cannot be loaded.
    """
    packing = None
    if target.kernels is not None:
        weight_dtype = torch.int8 if quantization == "int8" else target.model.dtype
        packing = Packing(target.kernels, weight_dtype=weight_dtype)
    elif quantization is not None:
        raise ConfigError(
            f"quantization (of the drafter): got {quantization!r}, which the native CPU kernels compute; "
            "the target does not run on them; leave it out"
        )
    return load_model(path, dtype=target.model.dtype, device=target.model.device, packing=packing)
