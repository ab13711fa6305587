"""Attention over the paged KV cache, causal or masked by a tree: the interface, with an implementation in each module."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from forerun.core.batch import ForwardBatch
from forerun.kv.cache import KVCache


class Attend(Protocol):
    """Attention for one forward pass; the batch and the cache are bound in."""

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write this pass's K and V into the cache, then attend.

        Args:
            layer: index of the layer's cache.
            query: [T, num_heads, key_dim]
            key: [T, num_kv_heads, key_dim], rotary already applied.
            value: [T, num_kv_heads, value_dim]
            scale: factor on the scores.
            window: a row at position i sees positions above i - window; None means all positions.
            soft_cap: scores become soft_cap * tanh(scores / soft_cap); None leaves them.
            sinks: [num_heads] one extra logit per head in the softmax's denominator, or None.

        Returns:
            [T, num_heads, value_dim]
        """
        ...


class Attention(Protocol):
    """One implementation of attention over a paged cache."""

    def begin(self, batch: ForwardBatch, cache: KVCache) -> Attend:
        """Prepare what all layers of one forward pass share."""
        ...
