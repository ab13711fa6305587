"""The bytes that a forward pass cannot do without: each weight once, and the KV of the context.

Divided by the memory's bandwidth they give the least time that a pass of few rows can take.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from forerun.models.config import DecoderConfig

SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class PassBytes:
    """What one forward pass reads from memory, at least."""

    config: DecoderConfig
    dtype: torch.dtype  # of the KV
    weight_dtype: torch.dtype = field(kw_only=True)

    @property
    def weights(self) -> int:
        """Bytes of all matrices, the head's included; an embedding that is not the head is only looked up.

        Where they are int8 each output has an fp32 scale.
        """
        scale = SCALE_BYTES if self.weight_dtype == torch.int8 else 0
        return sum(outputs * (inputs * self.weight_dtype.itemsize + scale) for outputs, inputs in self._matrices())

    def _matrices(self) -> list[tuple[int, int]]:
        """(outputs, inputs) of each."""
        config = self.config
        width, inner = config.hidden_size, config.intermediate_size
        query_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        layer = [(query_width + 2 * kv_width, width), (width, query_width), (2 * inner, width), (width, inner)]
        return [*layer * config.num_layers, (config.vocab_size, width)]

    def kv(self, context: int) -> int:
        """Bytes of keys and values that one sequence's next token sees, `context` tokens and no more than the windows."""
        seen = sum(context if window is None else min(context, window) for window in self.config.windows)
        return seen * 2 * self.config.num_kv_heads * self.config.head_dim * self.dtype.itemsize
