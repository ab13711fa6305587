"""Medusa: heads on the target's last hidden state draft all tokens at once (arXiv 2401.10774)."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.core.draft import Draft
from forerun.core.sequence import Sequence
from forerun.drafters.base import DraftContext, Drafter, TargetInfo
from forerun.drafters.features import last_features
from forerun.drafters.independent import IndependentWriter
from forerun.drafters.wording import WordedConfig
from forerun.models.heads.medusa import MedusaHeads, load_medusa
from forerun.models.store import resolve_model


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig(WordedConfig):
    """vLLM's keys: the heads' checkpoint, and how their tokens are chosen (`Wording`).

    Raises:
        ConfigError: a value is out of range.
    """

    model: str

    def build(self, target: TargetInfo) -> Drafter:
        """Load the heads.

        Raises:
            ConfigError: drafts could be deeper than there are heads, or the tree is too large.
            ModelError: the heads cannot be loaded or were not made for this target.
        """
        heads = load_medusa(resolve_model(str(self.model)), target.itself)
        wording = self.wording
        wording.check_depth(target.num_speculative_tokens, deepest=heads.num_heads)
        return Medusa(heads, wording.independent_writer(target, heads), block_size=target.block_size)


class Medusa:
    """Reads one feature of each text, that of its last computed token, and keeps nothing."""

    def __init__(self, heads: MedusaHeads, writer: IndependentWriter, *, block_size: int) -> None:
        self.needs = frozenset(heads.needs)
        self._heads = heads
        self._writer = writer
        self._block_size = block_size

    def start(self, sequence: Sequence) -> None:
        """Nothing to know."""

    def propose(self, context: DraftContext) -> list[Draft]:
        """Draft for all sequences in one pass."""
        requests = context.requests
        (name,) = self.needs
        hidden = last_features(context.features[name], requests, block_size=self._block_size)
        deepest = max(min(request.max_tokens, request.max_depth) for request in requests)
        return self._writer.write(requests, self._heads.logits(hidden, count=min(deepest, self._writer.depth)))

    def stop(self, sequence: Sequence) -> None:
        """Nothing to forget."""
