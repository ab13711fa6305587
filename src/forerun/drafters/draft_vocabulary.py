"""A draft model's vocabulary compared with the target's, and translated where they differ."""

from __future__ import annotations

import logging
from pathlib import Path

from forerun.errors import ConfigError
from forerun.models.base import CausalModel, LoadedTarget
from forerun.models.tokenizer import Tokenizer, load_tokenizer
from forerun.models.tokenizer_files import has_tokenizer
from forerun.models.vocabulary_map import VocabularyMappedModel, map_vocabulary

logger = logging.getLogger(__name__)

SAME_VOCABULARY = 0.9  # of the tokens; fine-tuning adds and renames some
LEAST_TWINS = 0.1  # of the smaller vocabulary; with fewer a draft model can hardly draft anything


def with_vocabulary_of(
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
