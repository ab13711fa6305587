"""The part of the target's vocabulary that a head can draft."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.errors import ModelError
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
    outside = (target_ids < 0) | (target_ids >= vocab_size)
    if outside.any():
        draft_id = int(outside.nonzero()[0])
        raise ModelError(
            f"d2t: draft token {draft_id} is the target's {int(target_ids[draft_id])}; must be from 0 to {vocab_size - 1}; "
            "use a head that was trained for this target"
        )
    if len(set(target_ids.tolist())) != num_draft:
        raise ModelError("d2t: two draft tokens are the same of the target; download the checkpoint again")
    if "t2d" in weights:
        drafted = weights.tensor("t2d", (vocab_size,), dtype=torch.bool)
        if int(drafted.sum()) != num_draft or not drafted[target_ids].all():
            raise ModelError(
                f"t2d: marks {int(drafted.sum())} tokens of the target, d2t {num_draft}, and they must be the same; "
                "download the checkpoint again"
            )
    return target_ids
