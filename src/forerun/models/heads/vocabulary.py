"""The part of the target's vocabulary that a head can draft."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.errors import ModelError
from forerun.models.folder import CONFIG_FILE
from forerun.models.heads.reader import HeadReader


def read_target_ids(reader: HeadReader, *, num_draft: int) -> Tensor | None:
    """The target's token of each of `num_draft` logits, from `d2t`, whose entry i is that token's id minus i.

    None: the head drafts the whole vocabulary.

    Raises:
        ModelError: d2t is missing or points outside the vocabulary or twice to one token, or t2d contradicts it.
    """
    vocab_size, weights = reader.target.model.vocab_size, reader.weights
    if "d2t" not in weights:
        if num_draft == vocab_size:
            return None
        raise ModelError(
            f"checkpoint: has no d2t, but a draft vocabulary of {num_draft} tokens for the target's {vocab_size}; "
            "download the checkpoint again"
        )
    offsets = weights.tensor("d2t", (num_draft,), dtype=torch.int64)
    target_ids = torch.arange(num_draft, device=offsets.device) + offsets
    _check_ids("d2t", target_ids, vocab_size)
    if "t2d" in weights:
        drafted = weights.tensor("t2d", (vocab_size,), dtype=torch.bool)
        if int(drafted.sum()) != num_draft or not drafted[target_ids].all():
            raise ModelError(
                f"t2d: marks {int(drafted.sum())} tokens of the target, d2t {num_draft}, and they must be the same; "
                "download the checkpoint again"
            )
    return target_ids


def read_token_map(reader: HeadReader) -> Tensor | None:
    """The target's token of each logit, from `token_map`, which holds their ids in any order (vLLM's Medusa).

    None: the heads draft the whole vocabulary.

    Raises:
        ModelError: `truncated_vocab_size` has another number of tokens, or the map points outside the vocabulary or twice
            to one token.
    """
    vocab_size, weights = reader.target.model.vocab_size, reader.weights
    num_mapped = weights.shape("token_map")[0] if "token_map" in weights else vocab_size
    asked = reader.content.get("truncated_vocab_size")
    if asked not in (None, num_mapped):
        raise ModelError(
            f"{CONFIG_FILE} of the head: truncated_vocab_size: got {asked!r}, the checkpoint has tokens for {num_mapped}; "
            "download the checkpoint again"
        )
    if "token_map" not in weights:
        return None
    target_ids = weights.tensor("token_map", (num_mapped,), dtype=torch.int64)
    _check_ids("token_map", target_ids, vocab_size)
    return target_ids


def _check_ids(name: str, target_ids: Tensor, vocab_size: int) -> None:
    """Hold a map to the target's vocabulary: no token outside it, none twice."""
    outside = (target_ids < 0) | (target_ids >= vocab_size)
    if outside.any():
        draft_id = int(outside.nonzero()[0])
        raise ModelError(
            f"{name}: draft token {draft_id} is the target's {int(target_ids[draft_id])}; must be from 0 to "
            f"{vocab_size - 1}; use a head that was trained for this target"
        )
    if len(set(target_ids.tolist())) != len(target_ids):
        raise ModelError(f"{name}: two draft tokens are the same of the target; download the checkpoint again")
