"""DFlash: a block diffusion head fills a block of masks in one pass (arXiv 2602.06036)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from forerun.core.batch import ForwardBatch
from forerun.core.draft import Draft
from forerun.drafters.base import Drafter, TargetInfo
from forerun.drafters.device_chains import DeviceChains
from forerun.drafters.neural.device_builders import DeviceBuilder, device_builder
from forerun.drafters.neural.device_masks import MaskedDrafts, behind_each
from forerun.drafters.neural.device_texts import kv_slots, lengths_of
from forerun.drafters.neural.forward import MAX_TEXT_ROWS, DraftSequence, ForwardPasses, Prediction, QueryRows
from forerun.drafters.neural.head_config import TrainedHeadConfig
from forerun.drafters.neural.kv import KVDrafter, check_max_model_len, resolve_max_model_len
from forerun.drafters.neural.parallel import TreeBuilder, draft_depth, make_tree_builder, write_in_one_pass
from forerun.kv.cache import KVCache, LayerKV
from forerun.models.base import MaskToken
from forerun.models.heads.dflash import DFlashHead, load_dflash
from forerun.models.store import resolve_model
from forerun.ops.attention import Attend, Attention
from forerun.ops.cuda.chains import ChainPlan
from forerun.ops.cuda.passes import DeviceAttention
from forerun.ops.cuda.table import DeviceTable, RuleTable
from forerun.ops.native.chains import NativeChains


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(TrainedHeadConfig):
    """vLLM's keys: the head's checkpoint, those of `TrainedHeadConfig`, and the longest text to draft for.

    Raises:
        ConfigError: a value is out of range.
    """

    model: str
    max_model_len: int | None = None

    may_be_shared_out: ClassVar[bool] = False

    def __post_init__(self) -> None:
        TrainedHeadConfig.__post_init__(self)
        check_max_model_len(self.max_model_len)

    def build(self, target: TargetInfo) -> Drafter:
        """Load the head.

        Raises:
            ConfigError: a draft would be longer than the head's block, or `max_model_len` is above what it was made for.
            ModelError: the head cannot be loaded or was not made for this target.
        """
        head = load_dflash(resolve_model(str(self.model)), target.itself, quantization=self.quantization)
        self.sampling.check_depth(target.num_speculative_tokens, deepest=head.max_tokens)
        max_model_len = resolve_max_model_len(self.max_model_len, allowed=head.max_model_len)
        return DFlash(head, target, make_tree_builder(self.sampling, target, head), max_model_len=max_model_len)


class DFlash(KVDrafter):
    """Makes the context's KV entries from the target's hidden states, then drafts a block after each text in one pass."""

    def __init__(self, head: DFlashHead, target: TargetInfo, builder: TreeBuilder, *, max_model_len: int) -> None:
        self._blocks = BlockPredictor(head)
        self._builder = builder
        super().__init__(self._blocks, target, BlockWriter(builder, self._blocks), max_model_len=max_model_len)

    def use_kv(self, target_cache: KVCache, *, num_blocks: int) -> None:
        """See `KeepsKV`."""
        super().use_kv(target_cache, num_blocks=num_blocks)
        self._blocks.use(self._cache, self._attention)

    def on_device(self, table: DeviceTable, rules: RuleTable, sample: Callable[..., None]) -> DeviceChains | None:
        """See `DraftsOnDevice`."""
        network = self._network()
        if not isinstance(network.attention, DeviceAttention):
            return None
        builder = device_builder(self._builder, table, rules, sample)
        parts = (network, network.attention, builder.sampler, table, rules, sample)
        return DeviceBlockWriter(*parts, builder=builder, predictor=self._blocks)

    def _read_until(self, sequence: DraftSequence, end: int, hidden_states: Mapping[str, Tensor]) -> None:
        self._blocks.write_context([sequence], [end], hidden_states)
        sequence.num_read = end


class BlockPredictor:
    """The head as a `Predictor` of blocks that follow the entries made by `write_context`."""

    num_hidden = 0
    reads_tensors_only = False

    def __init__(self, head: DFlashHead) -> None:
        self.needs = frozenset(head.needs)
        self.kv_specs = head.kv_specs
        self.dtype = head.dtype
        self.device = head.device
        self.max_model_len = head.max_model_len
        self.target_ids = head.target_ids
        self.chains: NativeChains | None = None
        self.head = head

    def use(self, cache: KVCache, attention: Attention) -> None:
        """Keep the entries in `cache`."""
        self._cache = cache
        self._attention = attention

    def read_states(self, hidden_states: Mapping[str, Tensor], slots_before: Tensor) -> None:
        """Return None: the rows of a block are tokens alone."""

    def predict(self, batch: ForwardBatch, states: Tensor | None, attend: Attend) -> Prediction:  # noqa: ARG002
        """See `Predictor`."""
        causal = self._causal(batch) if self.head.has_causal_layers else attend
        return self.predict_blocks(batch, attend, causal)

    def predict_blocks(self, batch: ForwardBatch, whole: Attend, causal: Attend) -> Prediction:
        """Compute the rows of blocks: in `whole` they see all rows of their block, in `causal` those up to them."""
        outputs = self.head.forward(batch.token_ids, batch.positions, whole, causal)
        return Prediction(self.head.logits(outputs.index_select(0, batch.logits_rows)))

    def _causal(self, batch: ForwardBatch) -> Attend:
        sequences = [replace(rows, tree_mask=None) for rows in batch.sequences]
        return self._attention.begin(replace(batch, sequences=sequences), self._cache)

    def write_context(
        self, sequences: Listing[DraftSequence], ends: Listing[int], hidden_states: Mapping[str, Tensor]
    ) -> None:
        """Make the entries of each sequence's unread places before its end; those of long texts part by part."""
        block_size = self._cache.block_size
        places = [np.arange(sequence.num_read, end) for sequence, end in zip(sequences, ends, strict=True)]
        blocks = [sequence.block_ids[own // block_size] for sequence, own in zip(sequences, places, strict=True)]
        positions = np.concatenate(places)
        slots = np.concatenate(blocks).astype(np.int64) * block_size + positions % block_size
        for first in range(0, len(slots), MAX_TEXT_ROWS):
            rows = slice(first, first + MAX_TEXT_ROWS)
            self._write(self._tensor(slots[rows]), self._tensor(positions[rows]), hidden_states)

    def _write(self, slots: Tensor, positions: Tensor, hidden_states: Mapping[str, Tensor]) -> None:
        for kept, new in zip(self._cache.layers, self.context(slots, positions, hidden_states), strict=True):
            kept.key.index_copy_(0, slots, new.key.to(kept.key.dtype))
            kept.value.index_copy_(0, slots, new.value.to(kept.value.dtype))

    def context(self, slots: Tensor, positions: Tensor, hidden_states: Mapping[str, Tensor]) -> list[LayerKV]:
        """The entries of each layer for the places `positions` [T], from the hidden states at their slots [T]."""
        return self.head.context([hidden_states[name].index_select(0, slots) for name in self.head.needs], positions)

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device)


class BlockWriter:
    """Writes a draft in one pass over the text's last token, which the target has not computed yet, and masks behind it.

    All rows of the block see each other.
    """

    def __init__(self, builder: TreeBuilder, predictor: BlockPredictor) -> None:
        self.num_places = builder.depth + 1
        self._builder = builder
        self._predictor = predictor

    def write(
        self, passes: ForwardPasses, sequences: Listing[DraftSequence], hidden_states: Mapping[str, Tensor]
    ) -> list[Draft]:
        """See `Writer`."""
        asking = [sequence for sequence in sequences if sequence.wants_draft]
        if asking:
            ends = [sequence.request.num_computed for sequence in asking]
            self._predictor.write_context(asking, ends, hidden_states)
        return write_in_one_pass(self._builder, passes, sequences, [self._block(sequence) for sequence in asking])

    def _block(self, sequence: DraftSequence) -> QueryRows:
        place = sequence.request.num_computed
        (anchor,) = sequence.request.sequence.tokens_from(place)
        num_tokens = draft_depth(sequence, self._builder)
        token_ids = self._predictor.head.block(anchor, num_tokens)
        mask = torch.ones(len(token_ids), len(token_ids), dtype=torch.bool)
        return QueryRows(sequence=sequence, token_ids=token_ids, start=place, num_predicted=num_tokens, tree_mask=mask)


class DeviceBlockWriter(MaskedDrafts):
    """Does what `BlockWriter` does, on the device: makes the newest entries of the context, then computes a block after each text.

    A row sees all of its block as it reads all places up to the block's last one.

    Args:
        builder: makes drafts of what it predicts.
        predictor: of blocks.
        parts: those of `NetworkChains`.
    """

    def __init__(self, *parts: Any, builder: DeviceBuilder, predictor: BlockPredictor) -> None:
        super().__init__(*parts, builder=builder, mask=MaskToken(predictor.head.flags.mask_token_id))
        self._predictor = predictor
        self._drafts_from_anchor = predictor.head.flags.sample_from_anchor

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
        plan, lengths = self._begin(slots, self._depths(slots, depths), num_computed), lengths_of(self._table, slots)
        self._write_context(plan, lengths, features)
        num_from_anchor = int(self._drafts_from_anchor)
        most_masks, num_masks = min(most_tokens, self._depth) - num_from_anchor, plan.limits - num_from_anchor
        anchors, anchor_rows, _ = self._unread(replace(plan, starts=lengths - 1), 1)
        rows, at = behind_each(anchors, anchor_rows, self._masks(plan, num_masks, most_masks), most_masks)
        if not self._drafts_from_anchor:
            at = at.view(len(slots), -1)[:, 1:].flatten()
        ends = lengths - 1 + num_masks
        last_seen = torch.cat([ends, ends[:, None].expand(-1, most_masks).flatten()])
        whole = replace(rows, positions=last_seen, num_linear=last_seen + 1)
        batch = self._batch(rows, at)
        predicted = self._predictor.predict_blocks(batch, self._attend(whole), self._attend(rows))
        self._build(plan, limits, predicted.logits)

    def _write_context(self, plan: ChainPlan, lengths: Tensor, features: Mapping[str, Tensor]) -> None:
        """Make the entries of each text's unread places, which end before its last token's."""
        network = self._network
        places = plan.starts[:, None] + torch.arange(network.most_unread - 1, device=lengths.device)
        is_unread = (places < lengths[:, None] - 1) & ((plan.slots >= 0) & (plan.limits > 0))[:, None]
        places = torch.where(is_unread, places, 0)
        at = kv_slots(self._table, plan.slots, places, block_size=network.cache.block_size).flatten()
        made, written = (
            self._predictor.context(at, places.flatten(), features),
            torch.where(is_unread.flatten(), at, -1),
        )
        for kept, new in zip(network.cache.layers, made, strict=True):
            for entries, rows in ((kept.key, new.key), (kept.value, new.value)):
                self._attention.functions.keep(rows.flatten(1).contiguous(), written, entries.flatten(1))
