"""Drafts by a smaller model (arXiv 2211.17192, 2302.01318), of the same vocabulary or of another (2502.05202)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from forerun.drafters.base import Drafter, TargetInfo
from forerun.drafters.neural.forward import ModelPredictor
from forerun.drafters.neural.kv import KVDrafter, check_max_model_len, resolve_max_model_len
from forerun.drafters.neural.parallel import MaskWriter, check_parallel_drafting, make_tree_builder
from forerun.drafters.neural.sampling import DraftSamplingConfig
from forerun.drafters.neural.writers import Writer, make_writer
from forerun.errors import ConfigError
from forerun.models.base import CausalModel, LoadedTarget, MaskToken, SharesOut, TargetModel
from forerun.models.config_file import read_config, read_mask_token
from forerun.models.decoder import Decoder
from forerun.models.loader import LOADERS
from forerun.models.on_device import obstacle
from forerun.models.packing import Packing
from forerun.models.store import resolve_model
from forerun.models.tokenizer import Tokenizer, load_tokenizer
from forerun.models.tokenizer_files import has_tokenizer
from forerun.models.vocabulary_map import VocabularyMappedModel, map_vocabulary
from forerun.ops.cuda.decoder_layers import DeviceHead
from forerun.ops.native.formats import check_quantization
from forerun.ops.native.formats.blocks import row_bits_of

logger = logging.getLogger(__name__)

SAME_VOCABULARY = 0.9  # of the tokens; fine-tuning adds and renames some
LEAST_TWINS = 0.1  # of the smaller vocabulary; with fewer a draft model can hardly draft anything


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
        own = load_beside(
            target.itself.for_drafter(self.draft_tensor_parallel_size),
            path,
            quantization=self.quantization,
            max_model_len=self.max_model_len or target.max_model_len,
        )
        model = _with_vocabulary_of(target.itself, own, path, use_heterogeneous_vocab=self.use_heterogeneous_vocab)
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


def load_beside(
    target: LoadedTarget, path: Path, *, quantization: str | None, max_model_len: int, load_format: str = "auto"
) -> TargetModel:
    """Load a drafter's model on the target's device and on its kernels, in its dtype or, quantized, in bf16.

    `max_model_len`: tokens of the longest text that it may draft for.

    Raises:
        ConfigError: int8 is asked for where there are no native kernels, or several processes shall compute what they cannot.
        ModelError: it cannot be loaded.
    """
    packing, dtype = None, target.model.dtype
    if target.kernels is not None:
        # of rounded weights rows of eight bits, too: a draft need not be exact
        row_bits = row_bits_of("auto" if quantization is None else "int8", target.kernels.level)
        packing = Packing.choose(target.kernels, dtype=dtype, quantization=quantization, row_bits=row_bits)
        dtype = packing.format.activations
    elif quantization is not None:
        raise ConfigError(
            f"quantization (of the drafter): got {quantization!r}, which the native CPU kernels compute; "
            "the target does not run on them; leave it out"
        )
    model = LOADERS[load_format](
        path, dtype=dtype, device=target.model.device, packing=packing, max_model_len=max_model_len
    )
    if target.on_device is not None and isinstance(model, Decoder) and obstacle(model) is None:
        model = target.on_device.decoder(model)
    return model if target.drafter_ranks is None else _shared_out(model, target.drafter_ranks, path)


def _shared_out(model: TargetModel, ranks: SharesOut, path: Path) -> Decoder:
    """The same model with layers and a head that all of a target's processes compute.

    Raises:
        ConfigError: they cannot.
    """
    if not isinstance(model, Decoder):
        raise ConfigError(
            f"draft_tensor_parallel_size: got {ranks.num_ranks}, but {path} runs through transformers' own code, which computes "
            "in one process; set it to 1"
        )
    assert not isinstance(model.head, DeviceHead), "several processes compute on other kernels"
    return model.with_parts(layers=ranks.layers(model.layers, model.config), head=ranks.head(model.head))


def _read_mask(path: Path, own: CausalModel, model: CausalModel) -> MaskToken:
    """The mask that the draft model in `path` was trained with, as a token of `model`, which is `own` or translates for it."""
    token_id = read_mask_token(read_config(path).to_dict(), vocab_size=own.vocab_size)
    return MaskToken(model.number_of(token_id) if isinstance(model, VocabularyMappedModel) else token_id)


def _with_vocabulary_of(
    target: LoadedTarget, model: CausalModel, path: Path, *, use_heterogeneous_vocab: bool
) -> CausalModel:
    """Return the draft model in `path` as one that reads and predicts the target's tokens.

    That is `model` itself where the tokens are the same, or where they cannot be compared but there are
    as many. The same tokens in logits of another width (padding rows) are always translated.

    Raises:
        ConfigError: the tokens differ and `use_heterogeneous_vocab` is False, or too few can be translated.
        ModelError: a tokenizer cannot be read.
    """
    width = target.model.vocab_size
    if target.tokenizer is None or not has_tokenizer(path):
        _check_uncompared(target, model, path, use_heterogeneous_vocab=use_heterogeneous_vocab)
        return model
    draft_tokenizer = load_tokenizer(path)
    num_same, num_tokens = _count_same(target.tokenizer, draft_tokenizer)
    is_family = num_same >= SAME_VOCABULARY * num_tokens
    if not is_family and not use_heterogeneous_vocab:
        raise ConfigError(
            f"speculative_config: draft model {path} has other tokens than the target ({num_same} of {num_tokens} ids "
            "mean the same); set use_heterogeneous_vocab=True, or use a draft model of the target's family"
        )
    if model.vocab_size == width and (num_same == num_tokens or not use_heterogeneous_vocab):
        return model
    return _translated(target.tokenizer, width, model, draft_tokenizer, path)


def _check_uncompared(target: LoadedTarget, model: CausalModel, path: Path, *, use_heterogeneous_vocab: bool) -> None:
    """Raise `ConfigError` where one tokenizer is missing and a translation is asked for, or the sizes differ."""
    if use_heterogeneous_vocab:
        whose = "the target" if target.tokenizer is None else f"draft model {path}"
        raise ConfigError(
            f"use_heterogeneous_vocab: got True, but {whose} has no tokenizer; both need one, to know which tokens "
            "are the same; add tokenizer.json, or use a draft model of the target's family"
        )
    if model.vocab_size != target.model.vocab_size:
        raise ConfigError(
            f"speculative_config: draft model {path} has a vocabulary of {model.vocab_size} tokens, the target of "
            f"{target.model.vocab_size}; must be the same; use a draft model of the target's family, or "
            "use_heterogeneous_vocab=True (needs the tokenizers of both)"
        )


def _count_same(target: Tokenizer, draft: Tokenizer) -> tuple[int, int]:
    """The number of ids that mean the same token in both, and the number of tokens of the larger vocabulary."""
    ours, theirs = target.tokens, draft.tokens
    return len(ours.items() & theirs.items()), max(len(ours), len(theirs))


def _translated(
    target_tokenizer: Tokenizer, width: int, model: CausalModel, draft_tokenizer: Tokenizer, path: Path
) -> VocabularyMappedModel:
    """The model behind a map from the target's tokens to its own."""
    target, draft = target_tokenizer.vocabulary(width), draft_tokenizer.vocabulary(model.vocab_size)
    vocabulary_map = map_vocabulary(target, draft, vocab_size=width)
    num_twins, smaller = vocabulary_map.num_twins, min(len(target.text_ids), len(draft.text_ids))
    if num_twins < LEAST_TWINS * smaller:
        raise ConfigError(
            f"use_heterogeneous_vocab: only {num_twins} tokens of draft model {path} are tokens of the target too; "
            f"must be {LEAST_TWINS:.0%} of the smaller vocabulary ({smaller} tokens) or more; use another draft model"
        )
    logger.info("draft model %s: %d of its tokens are among the target's %d", path, num_twins, len(target.text_ids))
    return VocabularyMappedModel(model, vocabulary_map)
