"""A PARD draft model in training, which drafts all tokens in one pass (arXiv 2504.18583)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from transformers import AutoConfig

from forerun.models.base import LoadedTarget
from forerun.models.decoder import Decoder, build_decoder
from forerun.models.mask_token import MaskToken, read_mask_token
from forerun.models.weights import Checkpoint
from forerun.ops.attention.base import Attend


@dataclass(frozen=True, slots=True, kw_only=True)
class PardModel:
    """A decoder, and the mask that it reads in place of unknown tokens; it reads none of the target's features."""

    model: Decoder
    mask: MaskToken
    needs: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def build(cls, content: Mapping[str, Any], checkpoint: Checkpoint, target: LoadedTarget) -> PardModel:
        """Build the model from a config.json and its tensors, in the same way as for drafting.

        Raises:
            ModelError: the configuration names no mask, or tensors are missing or surplus.
        """
        config = AutoConfig.for_model(**content)
        model = build_decoder(config, checkpoint, dtype=target.model.dtype, device=target.model.device)
        return cls(model=model, mask=MaskToken(read_mask_token(content, vocab_size=model.vocab_size)))

    def logits(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Logits of the token after each row: token ids [T], positions [T] -> [T, vocab_size]."""
        model = self.model
        hidden = model.layers(model.embed(token_ids), model.rotations(positions), attend, 0, model.num_layers)
        return model.logits(model.norm(hidden))
