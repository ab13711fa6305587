"""One forward pass of the target."""

from __future__ import annotations

from forerun.core.batch import ForwardBatch, ForwardResult
from forerun.kv.cache import KVCache
from forerun.models.base import TargetModel
from forerun.ops.attention.base import Attend, Attention


class Runner:
    """Runs the target over the KV cache that it owns; knows nothing of sequences or drafts."""

    def __init__(self, model: TargetModel, attention: Attention, cache: KVCache) -> None:
        self.model = model
        self.cache = cache
        self._attention = attention

    def prepare(self, batch: ForwardBatch) -> Attend:
        """What all layers of one pass share (host work, counted as building the batch)."""
        return self._attention.begin(batch, self.cache)

    def forward(self, batch: ForwardBatch, attend: Attend) -> ForwardResult:
        """Logits at the rows to judge; the features the drafter asked for are kept in the cache."""
        result = self.model.forward(batch, attend)
        self.cache.keep(batch.slot_mapping, result.features)
        return result
