"""The interface between drafters and trained heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from forerun.core.batch import LayerKVSpec
from forerun.ops.attention.base import Attend


class DraftHead(Protocol):
    """A small network on the target's hidden states that predicts one token further than the target.

    Row i, at position i, reads token x[i + 1] and a state of token x[i], and predicts x[i + 2], as in
    EAGLE (arXiv 2401.15077) and in DeepSeek-V3's multi-token prediction (arXiv 2412.19437).
    """

    needs: tuple[str, ...]  # the target's hidden states that it reads, as in `ForwardBatch.features`
    kv_specs: list[LayerKVSpec]
    dtype: torch.dtype
    device: torch.device
    max_model_len: int  # tokens, as its own configuration allows
    target_ids: Tensor | None  # the target's token of each logit, [V] int64 ascending; None if V is its vocabulary

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        """Fuse the hidden states that it `needs`, [T, hidden_size of the target] each -> states [T, width]."""
        ...

    def forward(self, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Compute a packed pass: [T] int64, [T, width], [T] int64 -> outputs [T, hidden_size]."""
        ...

    def states(self, outputs: Tensor) -> Tensor:
        """Turn outputs [R, hidden_size] into states [R, width], which are read with the tokens drafted from them."""
        ...

    def logits(self, outputs: Tensor) -> Tensor:
        """Apply norm and head: outputs [R, hidden_size] -> [R, V] fp32."""
        ...
