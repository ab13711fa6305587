"""Chains on a device of networks without KV, which read the target's last hidden state of each text alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from forerun.drafters.base import DraftRequest
from forerun.drafters.neural.device import ChainFunctions
from forerun.drafters.neural.device_picks import DevicePicks
from forerun.drafters.neural.device_texts import kv_slots, last_tokens, lengths_of
from forerun.ops.cuda.table import DeviceTable

Pick = Callable[[Tensor, int], Tensor]
"""Picks the tokens at a depth, from 0 on, by their logits [N, V]: [N] int32, below 0 where there is none."""

Predict = Callable[[Tensor, Tensor, Pick, int], list[Tensor]]
"""What a network drafts: hidden states [N, width], the tokens [N] after them, how to pick, and the number of depths -> what was picked."""


class LastHiddenChains:
    """Implements `DeviceChains` by what a network makes of the hidden states that `last_hidden_states` finds.

    Args:
        predict: computes the network.
        picks: of tokens.
        table: the texts; drafts are written there.
        depth: tokens of a chain, at most.
        feature: the name of the target's last hidden state.
        block_size: places in a block of the target's cache.
    """

    writes_trees = False

    def __init__(
        self, predict: Predict, picks: DevicePicks, table: DeviceTable, *, depth: int, feature: str, block_size: int
    ) -> None:
        self._predict = predict
        self._picks = picks
        self._table = table
        self._depth = depth
        self._feature = feature
        self._block_size = block_size
        self._functions = ChainFunctions.choose(table.tokens.device)

    def may_draft(self, request: DraftRequest, *, is_pending: bool) -> bool:  # noqa: ARG002 - nothing is to be read before
        """See `DeviceChains`: wherever rules change no logit."""
        return request.max_tokens > 0 and self._picks.may_pick(request)

    def propose(
        self,
        slots: Tensor,
        limits: Tensor,  # noqa: ARG002 - a chain has as many tokens as it is deep
        depths: Tensor,
        num_computed: Tensor,  # noqa: ARG002 - the target has computed all that is read
        features: Mapping[str, Tensor],
        *,
        most_tokens: int,
    ) -> None:
        """See `DeviceChains`."""
        table, lengths = self._table, lengths_of(self._table, slots)
        last_computed = kv_slots(table, slots, lengths - 2, block_size=self._block_size)
        hidden = features[self._feature].index_select(0, last_computed)

        def pick(logits: Tensor, depth: int) -> Tensor:
            return self._picks.tokens(logits, slots, lengths - 1 + depth)

        drafted = self._predict(hidden, last_tokens(table, slots, lengths), pick, min(most_tokens, self._depth))
        self._functions.write_chains(table, slots, depths, torch.stack(drafted, dim=1))

    def note(self, request: DraftRequest, *, start: int) -> None:
        """See `DeviceChains`: no state is kept."""

    def forget(self, seq_id: int) -> None:
        """See `DeviceChains`: no state is kept."""
