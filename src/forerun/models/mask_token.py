"""The mask token, which drafters that predict several tokens in one pass read in place of tokens not known yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from forerun.errors import ModelError

MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Keys of config.json for the mask token; the first that is present counts, as in vLLM."""


@dataclass(frozen=True, slots=True)
class MaskToken:
    """A drafter's mask token, and the hidden state [width] that is its input with it, or None for drafters that read tokens only."""

    token_id: int
    state: Tensor | None = None


def read_mask_token(content: Mapping[str, Any], *, vocab_size: int) -> int:
    """Read the mask token from the content of a config.json.

    Raises:
        ModelError: it names none, or one outside the vocabulary.
    """
    for key in MASK_KEYS:
        token_id = content.get(key)
        if token_id is None:
            continue
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            raise ModelError(
                f"config.json of the drafter: {key}: got {token_id!r}; must be a token id from 0 to {vocab_size - 1}; mend it"
            )
        return token_id
    raise ModelError(
        f"config.json of the drafter: has none of {', '.join(MASK_KEYS)}, which parallel drafting needs; use a drafter "
        "that was trained for it, or leave parallel_drafting out"
    )
