"""Drafts on a device of networks without KV, which read the target's last hidden state of each text alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from forerun.drafters.base import DraftRequest
from forerun.drafters.neural.device import ChainFunctions
from forerun.drafters.neural.device_builders import DeviceBuilder
from forerun.drafters.neural.device_picks import DevicePicks
from forerun.drafters.neural.device_texts import kv_slots, last_tokens, lengths_of
from forerun.drafters.neural.device_trees import TreeGrower
from forerun.drafters.neural.forward import Prediction
from forerun.drafters.neural.sampling import DraftSampler
from forerun.ops.cuda.table import DeviceTable, RuleTable
from forerun.ops.cuda.trees import TreePlan


class LastHidden(NamedTuple):
    """Where the target's hidden states of the texts' last tokens but one lie."""

    feature: str
    block_size: int  # of the target's cache

    def of(self, table: DeviceTable, slots: Tensor, features: Mapping[str, Tensor]) -> Tensor:
        """[N, width], of each text."""
        lengths = lengths_of(table, slots)
        return features[self.feature].index_select(0, kv_slots(table, slots, lengths - 2, block_size=self.block_size))


class HiddenDrafts(ABC):
    """Implements `DeviceChains` by what a network makes of hidden states; subclasses write the drafts.

    Args:
        sampler: of the tokens.
        table: the texts; drafts are written there.
        last_hidden: finds the states.
    """

    writes_trees = False

    def __init__(self, sampler: DraftSampler, table: DeviceTable, last_hidden: LastHidden) -> None:
        self._sampler = sampler
        self._table = table
        self._last_hidden = last_hidden

    def may_draft(self, request: DraftRequest, *, is_pending: bool) -> bool:  # noqa: ARG002 - nothing is to be read before
        """See `DeviceChains`: wherever rules change no logit, or that does not matter."""
        return request.max_tokens > 0 and self._sampler.may_draft_on_device(request)

    def propose(
        self,
        slots: Tensor,
        limits: Tensor,
        depths: Tensor,
        num_computed: Tensor,  # noqa: ARG002 - the target has computed all that is read
        features: Mapping[str, Tensor],
        *,
        most_tokens: int,
    ) -> None:
        """See `DeviceChains`."""
        hidden = self._last_hidden.of(self._table, slots, features)
        self._draft(TreePlan(slots=slots, limits=limits, depths=depths.int()), hidden, most_tokens=most_tokens)

    @abstractmethod
    def _draft(self, plan: TreePlan, hidden: Tensor, *, most_tokens: int) -> None:
        """Draft after N texts, by their hidden states [N, width]."""

    def note(self, request: DraftRequest, *, start: int) -> None:  # noqa: B027 - there is nothing to note
        """See `DeviceChains`: no state is kept."""

    def forget(self, seq_id: int) -> None:  # noqa: B027 - there is nothing to forget
        """See `DeviceChains`: no state is kept."""


Heads = Callable[[Tensor, int], Tensor]
"""Hidden states [N, width], a number of depths D -> the logits [N, D, V] of the tokens there."""


class HeadDrafts(HiddenDrafts):
    """Drafts what heads predict all at once."""

    def __init__(self, heads: Heads, builder: DeviceBuilder, table: DeviceTable, last_hidden: LastHidden) -> None:
        super().__init__(builder.sampler, table, last_hidden)
        self.writes_trees = builder.writes_trees
        self._heads = heads
        self._builder = builder

    def _draft(self, plan: TreePlan, hidden: Tensor, *, most_tokens: int) -> None:
        self._builder.build(plan, self._heads(hidden, min(most_tokens, self._builder.depth)))


class RecurrentNetwork(Protocol):
    """A network without KV that predicts a token at each step, from the token and the state before it."""

    def begin(self, hidden: Tensor) -> Tensor:
        """The states of the first step, from the target's hidden states [R, hidden_size]."""
        ...

    def step(self, index: int, token_ids: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Step `index`: tokens [R], states -> logits [R, V], states of the next step."""
        ...


class RecurrentChains(HiddenDrafts):
    """Drafts a token with each step, of which the next one reads it."""

    def __init__(
        self,
        network: RecurrentNetwork,
        sampler: DraftSampler,
        table: DeviceTable,
        rules: RuleTable,
        sample: Callable[..., None],
        last_hidden: LastHidden,
        *,
        depth: int,
    ) -> None:
        super().__init__(sampler, table, last_hidden)
        self._network = network
        self._depth = depth
        self._picks = DevicePicks(sampler, rules, sample)
        self._write_chains = ChainFunctions.choose(table.tokens.device).write_chains

    def _draft(self, plan: TreePlan, hidden: Tensor, *, most_tokens: int) -> None:
        lengths = lengths_of(self._table, plan.slots)
        tokens, states = last_tokens(self._table, plan.slots, lengths), self._network.begin(hidden)
        drafted: list[Tensor] = []
        for depth in range(min(most_tokens, self._depth)):
            logits, states = self._network.step(depth, tokens, states)
            drafted.append(self._picks.tokens(logits, plan.slots, lengths - 1 + depth))
            tokens = drafted[-1].clamp(min=0).long()
        self._write_chains(self._table, plan.slots, plan.depths, torch.stack(drafted, dim=1))


class RecurrentTrees(HiddenDrafts):
    """Drafts a level of a tree with each step, of which the next one reads some nodes."""

    writes_trees = True

    def __init__(
        self, network: RecurrentNetwork, grower: TreeGrower, table: DeviceTable, last_hidden: LastHidden
    ) -> None:
        super().__init__(grower.sampler, table, last_hidden)
        self._network = network
        self._grower = grower

    def _draft(self, plan: TreePlan, hidden: Tensor, *, most_tokens: int) -> None:
        tokens = last_tokens(self._table, plan.slots, lengths_of(self._table, plan.slots))
        passes = _RecurrentPasses(self._network, hidden, tokens)
        self._grower.grow(plan, passes, num_levels=min(most_tokens, self._grower.depth))


class _RecurrentPasses(NamedTuple):
    """Implements `LevelPasses`."""

    network: RecurrentNetwork
    hidden: Tensor  # [N, hidden_size]
    last_tokens: Tensor  # [N] of the texts

    def begin(self) -> Prediction:
        return Prediction(*self.network.step(0, self.last_tokens, self.network.begin(self.hidden)))

    def go_on(self, tokens: Tensor, columns: Tensor, states: Tensor | None) -> Prediction:
        assert states is not None, "each step has given some"
        return Prediction(*self.network.step(columns.shape[2], tokens.flatten().clamp(min=0).long(), states))
