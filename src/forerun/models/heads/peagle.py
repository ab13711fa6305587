"""P-EAGLE's head: EAGLE-3's, with a learned state for positions whose hidden states are not known yet (arXiv 2602.01469)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.errors import ModelError
from forerun.models.base import LoadedTarget
from forerun.models.config import DecoderConfig
from forerun.models.heads.eagle3 import Eagle3Head, canonical_name
from forerun.models.heads.reader import HeadReader
from forerun.models.mask_token import MaskToken, read_mask_token


def load_peagle(folder: Path, target: LoadedTarget) -> PEagleHead:
    """Load a published P-EAGLE checkpoint.

    Raises:
        ModelError: files or tensors are missing, surplus, damaged, or do not fit the target, or config.json names no mask token.
    """
    return PEagleHead(HeadReader.open(folder, target, rename=canonical_name))


class PEagleHead(Eagle3Head):
    """EAGLE-3's head with a `mask`, whose state is `mask_hidden` after the norms and `fc`, as hidden states are fused.

    `num_trained` is how many tokens it was trained to draft in a pass, or None if config.json does not name it.
    """

    mask: MaskToken

    def __init__(self, reader: HeadReader) -> None:
        if "mask_hidden" not in reader.weights:
            raise ModelError(
                "checkpoint: has no mask_hidden, so it is not of P-EAGLE; if it is of EAGLE-3, set method='eagle3'"
            )
        super().__init__(reader)
        self.num_trained = _num_trained(reader.content)

    def _read_fusion(self, reader: HeadReader, config: DecoderConfig) -> None:
        super()._read_fusion(reader, config)
        count, model = len(self.needs), reader.target.model
        shape = reader.weights.shape("mask_hidden")  # [1, 1, width] in speculators' layout, [1, width] in others
        if math.prod(shape) != count * model.hidden_size:
            raise ModelError(
                f"checkpoint: mask_hidden has shape {list(shape)}, the {count} features of the target are "
                f"{count * model.hidden_size} wide; use a head that was trained for this target"
            )
        features = reader.weights.tensor("mask_hidden", shape).view(1, -1).chunk(count, dim=-1)
        state = self.fuse(features)[0]
        self.mask = MaskToken(read_mask_token(reader.content, vocab_size=model.vocab_size), state)


def _num_trained(content: Mapping[str, Any]) -> int | None:
    """Return the tokens per pass in speculators' format, which are as many as were trained, or None."""
    proposals = (content.get("speculators_config") or {}).get("proposal_methods") or [{}]
    found: int | None = proposals[0].get("speculative_tokens")
    return found
