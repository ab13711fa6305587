"""Drafts by a smaller model (arXiv 2211.17192, 2302.01318), of the same vocabulary or of another (2502.05202)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forerun.drafters.base import Drafter, TargetInfo
from forerun.drafters.draft_vocabulary import with_vocabulary_of
from forerun.drafters.neural.forward import ModelPredictor
from forerun.drafters.neural.kv import KVDrafter, check_max_model_len, resolve_max_model_len
from forerun.drafters.neural.parallel import MaskWriter, check_parallel_drafting, make_tree_builder
from forerun.drafters.neural.sampling import DraftSamplingConfig
from forerun.drafters.neural.writers import Writer, make_writer
from forerun.errors import ConfigError
from forerun.models.base import CausalModel, LoadedTarget, MaskToken, TargetModel
from forerun.models.config_file import read_config, read_mask_token
from forerun.models.loader import load_model
from forerun.models.packing import Packing
from forerun.models.store import resolve_model
from forerun.models.vocabulary_map import VocabularyMappedModel
from forerun.ops.native.formats import check_quantization


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelConfig(DraftSamplingConfig):
    """vLLM's keys: the draft model, its weights, how tokens are picked (`DraftSampling`), and the longest text to draft for.

    `use_heterogeneous_vocab` allows a tokenizer that differs from the target's. With `parallel_drafting` the
    model drafts all tokens in one pass (`MaskWriter`).

    Raises:
        ConfigError: a value is out of range.
    """

    model: str
    quantization: str | None = None
    max_model_len: int | None = None
    use_heterogeneous_vocab: bool = False
    parallel_drafting: bool = False

    def __post_init__(self) -> None:
        DraftSamplingConfig.__post_init__(self)
        check_parallel_drafting(self.parallel_drafting)
        check_quantization(self.quantization, setting="quantization (of the drafter)")
        check_max_model_len(self.max_model_len)
        if not isinstance(self.use_heterogeneous_vocab, bool):
            raise ConfigError(f"use_heterogeneous_vocab: got {self.use_heterogeneous_vocab!r}; may be True or False")

    def build(self, target: TargetInfo) -> Drafter:
        """Load the model.

        Raises:
            ConfigError: its vocabulary differs from the target's and cannot or may not be translated, or
                `max_model_len` is above what the model was made for.
            ModelError: it cannot be loaded, or drafts in parallel and names no mask token.
        """
        path = resolve_model(str(self.model))
        own = load_beside(target.itself, path, quantization=self.quantization)
        model = with_vocabulary_of(target.itself, own, path, use_heterogeneous_vocab=self.use_heterogeneous_vocab)
        max_model_len = resolve_max_model_len(self.max_model_len, allowed=model.max_model_len)
        predictor = ModelPredictor(model)
        if self.parallel_drafting:
            builder = make_tree_builder(self.sampling, target, predictor)
            writer: Writer = MaskWriter(builder, _read_mask(path, own, model))
        else:
            writer = make_writer(self.sampling, target, predictor)
        return KVDrafter(predictor, target, writer, max_model_len=max_model_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class PardConfig(DraftModelConfig):
    """The settings of a model that was trained to draft in parallel (PARD, arXiv 2504.18583)."""

    parallel_drafting: bool = True

    def __post_init__(self) -> None:
        DraftModelConfig.__post_init__(self)
        if not self.parallel_drafting:
            raise ConfigError("parallel_drafting: got False with method 'pard'; leave it out, or say 'draft_model'")


def load_beside(target: LoadedTarget, path: Path, *, quantization: str | None) -> TargetModel:
    """Load a drafter's model on the target's device, in its dtype and on its kernels.

    Raises:
        ConfigError: int8 is asked for where there are no native kernels.
        ModelError: it cannot be loaded.
    """
    packing = None
    if target.kernels is not None:
        packing = Packing.choose(target.kernels, dtype=target.model.dtype, quantization=quantization)
    elif quantization is not None:
        raise ConfigError(
            f"quantization (of the drafter): got {quantization!r}, which the native CPU kernels compute; "
            "the target does not run on them; leave it out"
        )
    return load_model(path, dtype=target.model.dtype, device=target.model.device, packing=packing)


def _read_mask(path: Path, own: CausalModel, model: CausalModel) -> MaskToken:
    """The mask that the draft model in `path` was trained with, as a token of `model`, which is `own` or translates for it."""
    token_id = read_mask_token(read_config(path).to_dict(), vocab_size=own.vocab_size)
    return MaskToken(model.number_of(token_id) if isinstance(model, VocabularyMappedModel) else token_id)
