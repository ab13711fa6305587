"""What stands at a place of the text that nothing is known of yet, for drafters that fill several at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from forerun.errors import ModelError

MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Where a config.json names the mask token; the first that is there counts, as in vLLM."""


@dataclass(frozen=True, slots=True)
class MaskToken:
    """A token that a drafter was trained to read so, and the state [width] that it is read with (None: tokens alone are read)."""

    token_id: int
    state: Tensor | None = None


def read_mask_token(content: Mapping[str, Any], *, vocab_size: int) -> int:
    """The mask token that a config.json names.

    Raises:
        ModelError: it names none, or none of the vocabulary.
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
