"""The seam between drafters and trained heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from forerun.core.batch import LayerKVSpec
from forerun.ops.attention.base import Attend


class DraftHead(Protocol):
    """A small network on the target's hidden states that predicts one token further than they do.

    Row i holds token x[i + 1] and a state of token x[i], at position i, and predicts x[i + 2]
    (EAGLE, arXiv 2401.15077, and DeepSeek-V3's multi-token prediction, arXiv 2412.19437, count alike).
    """

    needs: tuple[str, ...]  # features of the target, as `ForwardBatch.features` names them
    kv_specs: list[LayerKVSpec]
    dtype: torch.dtype
    device: torch.device
    max_model_len: int  # tokens, as its own configuration allows
    target_ids: Tensor | None  # [V] int64 ascending: the target's token of each logit; None: all of them

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        """The features that it `needs`, [T, hidden_size of the target] each -> states [T, width]."""
        ...

    def forward(self, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """[T] int64, [T, width], [T] int64 -> outputs [T, hidden_size]"""
        ...

    def states(self, outputs: Tensor) -> Tensor:
        """Outputs [R, hidden_size] -> the states [R, width] that the tokens drafted from them are read with."""
        ...

    def logits(self, outputs: Tensor) -> Tensor:
        """Outputs [R, hidden_size] -> [R, V] fp32"""
        ...
