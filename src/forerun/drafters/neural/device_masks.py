"""Chains and trees that a device drafts in one pass: it reads the texts in its table, and masks in place of the tokens that come next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from forerun.drafters.neural.device import ChainNetwork, NetworkChains
from forerun.drafters.neural.device_builders import DeviceBuilder, device_builder
from forerun.drafters.neural.parallel import MaskWriter
from forerun.drafters.neural.writers import Writer
from forerun.models.base import MaskToken
from forerun.ops.cuda.chains import ChainPlan
from forerun.ops.cuda.passes import DeviceAttention
from forerun.ops.cuda.table import DeviceTable, RuleTable, StepRows
from forerun.ops.cuda.trees import TreePlan


def device_masks(
    network: ChainNetwork, writer: Writer, table: DeviceTable, rules: RuleTable, sample: Callable[..., None]
) -> DeviceMaskWriter | None:
    """Draft on the device what a writer would, where it writes drafts of masks and the network needs no host; else None."""
    if (
        not isinstance(writer, MaskWriter)
        or not isinstance(network.attention, DeviceAttention)
        or not network.predictor.reads_tensors_only
    ):
        return None
    builder = device_builder(writer.builder, table, rules, sample)
    parts = (network, network.attention, builder.sampler, table, rules, sample)
    return DeviceMaskWriter(*parts, builder=builder, mask=writer.mask)


class MaskedDrafts(NetworkChains):
    """A network that predicts all tokens of a draft in one pass; subclasses lay it out.

    Args:
        builder: makes drafts of what it predicts.
        mask: what is read in place of tokens that are not known yet.
        parts: those of `NetworkChains`.
    """

    def __init__(self, *parts: Any, builder: DeviceBuilder, mask: MaskToken) -> None:
        super().__init__(*parts, depth=builder.depth)
        self.writes_trees = builder.writes_trees
        self._builder = builder
        self._mask = mask

    def _masks(self, plan: ChainPlan, num_masks: Tensor, count: int) -> StepRows:
        """`count` rows behind each text, of which so many [N] are masks."""
        rows = self._rows(len(plan.slots) * count)
        self._functions.place_masks(
            *(plan, self._table, num_masks, rows),
            token_id=self._mask.token_id,
            block_size=self._network.cache.block_size,
        )
        return rows

    def _build(self, plan: ChainPlan, limits: Tensor, logits: Tensor) -> None:
        """Draft what logits [N * D, V] predict: those of the next D tokens of each text, one text after the other."""
        trees = TreePlan(slots=plan.slots, limits=limits, depths=plan.limits)
        self._builder.build(trees, logits.view(len(plan.slots), -1, logits.shape[1]))


class DeviceMaskWriter(MaskedDrafts):
    """Does what `MaskWriter` does, on the device: the text's last token predicts the first depth, and each mask after it one more."""

    def propose(
        self,
        slots: Tensor,
        limits: Tensor,
        depths: Tensor,
        num_computed: Tensor,
        features: Mapping[str, Tensor],
        *,
        most_tokens: int,
    ) -> None:
        """See `DeviceChains`."""
        plan = self._begin(slots, self._depths(slots, depths), num_computed)
        num_masks = min(most_tokens, self._depth) - 1
        texts, states, last_rows = self._read(plan, features)
        masks = self._masks(plan, plan.limits - 1, num_masks)
        if states is not None:
            assert self._mask.state is not None, "a network that reads states has one for masks"
            states = torch.cat([states, self._mask.state.expand(len(masks.slots), -1)])
        rows, at = behind_each(texts, last_rows, masks, num_masks)
        self._build(plan, limits, self._predict(rows, states, at).logits)


def behind_each(texts: StepRows, last_rows: Tensor, masks: StepRows, num_masks: int) -> tuple[StepRows, Tensor]:
    """All rows of a pass, the texts' before the masks; and those of each text's last token and its masks, [N * (1 + num_masks)]."""
    names = ("tokens", "positions", "slots", "kv_slots", "num_linear", "path_slots")
    rows = replace(texts, **{name: torch.cat([getattr(texts, name), getattr(masks, name)]) for name in names})
    behind = torch.arange(len(texts.slots), len(rows.slots), device=last_rows.device)
    return rows, torch.cat([last_rows[:, None], behind.view(len(last_rows), num_masks)], dim=1).flatten()
