"""Medusa: heads on the target's last hidden state draft all tokens at once (arXiv 2401.10774)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from forerun.core.draft import Draft
from forerun.core.sequence import Sequence
from forerun.drafters.base import DraftContext, Drafter, DraftRequest, TargetInfo
from forerun.drafters.device_chains import DeviceChains
from forerun.drafters.neural.device_builders import device_builder
from forerun.drafters.neural.device_hidden import HeadDrafts, LastHidden
from forerun.drafters.neural.forward import last_hidden_states
from forerun.drafters.neural.head_config import TrainedHeadConfig
from forerun.drafters.neural.parallel import TreeBuilder, make_tree_builder
from forerun.models.heads.medusa import MedusaHeads, load_medusa
from forerun.models.store import resolve_model
from forerun.ops.cuda.table import DeviceTable, RuleTable


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig(TrainedHeadConfig):
    """vLLM's keys: the heads' checkpoint, and those of `TrainedHeadConfig`.

    Raises:
        ConfigError: a value is out of range.
    """

    model: str

    may_be_shared_out: ClassVar[bool] = False

    def build(self, target: TargetInfo) -> Drafter:
        """Load the heads.

        Raises:
            ConfigError: drafts could be deeper than there are heads, or the tree is too large.
            ModelError: the heads cannot be loaded or were not made for this target.
        """
        heads = load_medusa(resolve_model(str(self.model)), target.itself, quantization=self.quantization)
        self.sampling.check_depth(target.num_speculative_tokens, deepest=heads.num_heads)
        return Medusa(heads, make_tree_builder(self.sampling, target, heads), block_size=target.block_size)


class Medusa:
    """Drafts from the target's hidden state at each sequence's last computed token; keeps no state."""

    def __init__(self, heads: MedusaHeads, builder: TreeBuilder, *, block_size: int) -> None:
        self.needs = frozenset(heads.needs)
        self._heads = heads
        self._builder = builder
        self._block_size = block_size

    def on_device(self, table: DeviceTable, rules: RuleTable, sample: Callable[..., None]) -> DeviceChains | None:
        """See `DraftsOnDevice`."""
        (name,) = self.needs
        builder = device_builder(self._builder, table, rules, sample)
        return HeadDrafts(self._predict, builder, table, LastHidden(name, self._block_size))

    def _predict(self, hidden: Tensor, depth: int) -> Tensor:
        """See `Heads`."""
        return torch.stack(self._heads.logits(hidden, count=depth), dim=1)

    def start(self, sequence: Sequence) -> None:
        """Do nothing: no state is kept."""

    def num_unread(self, request: DraftRequest) -> int:  # noqa: ARG002 - nothing is read for any
        """See `ReadsTexts`: only the target does."""
        return 0

    def propose(self, context: DraftContext) -> list[Draft]:
        """Draft for all sequences in one pass."""
        requests = context.requests
        (name,) = self.needs
        hidden = last_hidden_states(context.features[name], requests, block_size=self._block_size)
        deepest = max(min(request.max_tokens, request.max_depth) for request in requests)
        return self._builder.build(requests, self._heads.logits(hidden, count=min(deepest, self._builder.depth)))

    def stop(self, sequence: Sequence) -> None:
        """Do nothing: no state was kept."""
