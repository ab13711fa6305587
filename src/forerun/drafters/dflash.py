"""DFlash: a block diffusion head fills a block of masks in one pass (arXiv 2602.06036)."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from forerun.core.batch import ForwardBatch
from forerun.core.draft import Draft
from forerun.drafters.base import Drafter, TargetInfo
from forerun.drafters.independent import IndependentWriter
from forerun.drafters.kv_drafter import KVDrafter
from forerun.drafters.parallel_writer import depth_of, write_at_once
from forerun.drafters.passes import MOST_ROWS, Line, Rows
from forerun.drafters.predictor import Prediction
from forerun.drafters.wording import WordedConfig, check_longest, longest_text
from forerun.drafters.writers import ForwardPasses
from forerun.kv.cache import KVCache
from forerun.models.heads.dflash import DFlashHead, load_dflash
from forerun.models.store import resolve_model
from forerun.ops.attention.base import Attend, Attention


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(WordedConfig):
    """vLLM's keys: the head's checkpoint, how its tokens are chosen (`Wording`), and how far it may go.

    Raises:
        ConfigError: a value is out of range.
    """

    model: str
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        WordedConfig.__post_init__(self)
        check_longest(self.max_model_len)

    def build(self, target: TargetInfo) -> Drafter:
        """Load the head.

        Raises:
            ConfigError: a draft would be longer than the head's block, or `max_model_len` is above what it was made for.
            ModelError: the head cannot be loaded or was not made for this target.
        """
        head = load_dflash(resolve_model(str(self.model)), target.itself)
        wording = self.wording
        wording.check_depth(target.num_speculative_tokens, deepest=head.max_tokens)
        longest = longest_text(self.max_model_len, allowed=head.max_model_len)
        return DFlash(head, target, wording.independent_writer(target, head), max_model_len=longest)


class DFlash(KVDrafter):
    """Writes the context's entries from the target's features, then drafts a block after each text in one pass."""

    def __init__(self, head: DFlashHead, target: TargetInfo, words: IndependentWriter, *, max_model_len: int) -> None:
        self._blocks = BlockPredictor(head)
        super().__init__(self._blocks, target, BlockWriter(words, self._blocks), max_model_len=max_model_len)

    def use_kv(self, target_cache: KVCache, *, num_blocks: int) -> None:
        """See `KeepsKV`."""
        super().use_kv(target_cache, num_blocks=num_blocks)
        self._blocks.use(self._cache, self._attention)

    def _read_until(self, line: Line, end: int, features: Mapping[str, Tensor]) -> None:
        self._blocks.write_context([line], [end], features)
        line.start = end


class BlockPredictor:
    """The head as a `Predictor` of blocks, which follow entries that `write_context` has made."""

    num_hidden = 0

    def __init__(self, head: DFlashHead) -> None:
        self.needs = frozenset(head.needs)
        self.kv_specs = head.kv_specs
        self.dtype = head.dtype
        self.device = head.device
        self.max_model_len = head.max_model_len
        self.target_ids = head.target_ids
        self.head = head

    def use(self, cache: KVCache, attention: Attention) -> None:
        """Keep the entries there."""
        self._cache = cache
        self._attention = attention

    def read_states(self, features: Mapping[str, Tensor], slots_before: Tensor) -> None:
        """A block's rows are tokens and nothing else."""

    def predict(self, batch: ForwardBatch, states: Tensor | None, attend: Attend) -> Prediction:  # noqa: ARG002
        """See `Predictor`."""
        causal = self._causal(batch) if self.head.has_causal_layers else attend
        outputs = self.head.forward(batch.token_ids, batch.positions, attend, causal)
        return Prediction(self.head.logits(outputs.index_select(0, batch.logits_rows)))

    def _causal(self, batch: ForwardBatch) -> Attend:
        sequences = [replace(rows, tree_mask=None) for rows in batch.sequences]
        return self._attention.begin(replace(batch, sequences=sequences), self._cache)

    def write_context(self, lines: Listing[Line], ends: Listing[int], features: Mapping[str, Tensor]) -> None:
        """The entries of all lines' places before their `ends`, which the target has computed since; of long texts part by part."""
        block_size = self._cache.block_size
        places = [np.arange(line.start, end) for line, end in zip(lines, ends, strict=True)]
        blocks = [line.table[own // block_size] for line, own in zip(lines, places, strict=True)]
        positions = np.concatenate(places)
        slots = np.concatenate(blocks).astype(np.int64) * block_size + positions % block_size
        for first in range(0, len(slots), MOST_ROWS):
            rows = slice(first, first + MOST_ROWS)
            self._write(self._tensor(slots[rows]), self._tensor(positions[rows]), features)

    def _write(self, slots: Tensor, positions: Tensor, features: Mapping[str, Tensor]) -> None:
        entries = self.head.context([features[name].index_select(0, slots) for name in self.head.needs], positions)
        for kept, new in zip(self._cache.layers, entries, strict=True):
            kept.key.index_copy_(0, slots, new.key.to(kept.key.dtype))
            kept.value.index_copy_(0, slots, new.value.to(kept.value.dtype))

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device)


class BlockWriter:
    """A draft from one pass over the text's last token, of which the target has computed nothing yet, and masks; each sees all."""

    def __init__(self, words: IndependentWriter, predictor: BlockPredictor) -> None:
        self.num_places = words.depth + 1
        self._words = words
        self._predictor = predictor

    def write(self, passes: ForwardPasses, lines: Listing[Line], features: Mapping[str, Tensor]) -> list[Draft]:
        """See `Writer`."""
        wanted = [line for line in lines if line.is_wanted]
        if wanted:
            self._predictor.write_context(wanted, [line.request.num_computed for line in wanted], features)
        return write_at_once(self._words, passes, lines, [self._block(line) for line in wanted])

    def _block(self, line: Line) -> Rows:
        place = line.request.num_computed
        (anchor,) = line.request.sequence.tokens_from(place)
        num_tokens = depth_of(line, self._words)
        token_ids = self._predictor.head.block(anchor, num_tokens)
        mask = torch.ones(len(token_ids), len(token_ids), dtype=torch.bool)
        return Rows(line=line, token_ids=token_ids, start=place, num_wanted=num_tokens, mask=mask)
