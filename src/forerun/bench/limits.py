"""The bytes that a forward pass cannot do without: each weight once, and the KV of the context.

Divided by the memory's bandwidth they give the least time that a pass of few rows can take.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from forerun.models.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class PassBytes:
    """What one forward pass reads from memory, at least."""

    config: DecoderConfig
    dtype: torch.dtype  # of the KV
    weights: int = field(kw_only=True)  # of all matrices, see `Decoder.weight_bytes`

    def kv(self, context: int) -> int:
        """Bytes of keys and values that one sequence's next token sees, `context` tokens and no more than the windows."""
        seen = sum(context if window is None else min(context, window) for window in self.config.windows)
        return seen * 2 * self.config.num_kv_heads * self.config.head_dim * self.dtype.itemsize
