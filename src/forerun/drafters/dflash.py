"""DFlash: a block diffusion head fills a block of masks in one pass (arXiv 2602.06036)."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from forerun.core.batch import ForwardBatch
from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.sequence import Sequence
from forerun.drafters.base import DraftContext, Drafter, TargetInfo
from forerun.drafters.choice import Choice, check_sample_method
from forerun.drafters.kv_ledger import KVLedger
from forerun.drafters.passes import MOST_ROWS, Line, Passes, Rows, scratch_blocks_per_line
from forerun.drafters.predictor import Prediction
from forerun.drafters.wording import check_longest, longest_text
from forerun.drafters.writers import chains_from
from forerun.errors import ConfigError
from forerun.kv.cache import KVCache, bytes_per_block
from forerun.models.heads.dflash import DFlashHead, load_dflash
from forerun.models.loaded import choose_attention
from forerun.models.store import resolve_model
from forerun.ops.attention.base import Attend, Attention


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig:
    """vLLM's keys: the head's checkpoint, how its tokens are chosen (`Choice`), and how far it may go.

    Raises:
        ConfigError: a value is out of range.
    """

    model: str
    draft_sample_method: str = "greedy"
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        check_sample_method(self.draft_sample_method)
        check_longest(self.max_model_len)

    @property
    def default_num_speculative_tokens(self) -> int | None:
        """The user must say how many."""
        return None

    def build(self, target: TargetInfo) -> Drafter:
        """Load the head.

        Raises:
            ConfigError: a draft would be longer than the head's block, or `max_model_len` is above what it was made for.
            ModelError: the head cannot be loaded or was not made for this target.
        """
        head = load_dflash(resolve_model(str(self.model)), target.itself)
        if target.num_speculative_tokens > head.max_tokens:
            raise ConfigError(
                f"num_speculative_tokens: got {target.num_speculative_tokens}; the head drafts at most {head.max_tokens} "
                "at once; lower it"
            )
        longest = longest_text(self.max_model_len, allowed=head.max_model_len)
        choice = Choice(self.draft_sample_method, vocab_size=target.vocab_size, target_ids=head.target_ids)
        return DFlash(head, target, choice, max_model_len=longest)


class DFlash:
    """Writes the context's entries from the target's features, then drafts a block after each text in one pass.

    The entries of committed places are noted in a ledger, which says what is still to be written after
    a prefix hit, a preemption or a pause; those of a block are written over.
    """

    def __init__(self, head: DFlashHead, target: TargetInfo, choice: Choice, *, max_model_len: int) -> None:
        self.needs = frozenset(head.needs)
        self.kv_bytes_per_block = bytes_per_block(head.kv_specs, block_size=target.block_size, dtype=head.dtype)
        num_rows = target.num_speculative_tokens + 1
        self._scratch_per_line = scratch_blocks_per_line(num_rows, block_size=target.block_size)
        self.num_scratch_blocks = self._scratch_per_line * target.max_num_seqs
        self._head = head
        self._target = target
        self._choice = choice
        self._max_model_len = max_model_len

    def use_kv(self, target_cache: KVCache, *, num_blocks: int) -> None:
        """Make the cache: an entry of its own for each of the target's places, and the scratch blocks."""
        self._block_size = block_size = target_cache.block_size
        self._ledger = KVLedger(num_blocks, block_size=block_size)
        self._cache = KVCache(
            self._head.kv_specs,
            num_blocks=num_blocks + self.num_scratch_blocks,
            block_size=block_size,
            dtype=self._head.dtype,
            device=self._head.device,
        )
        attention = choose_attention(self._head.kv_specs, self._target.itself.kernels)
        self._passes = Passes(
            BlockPredictor(self._head, attention, self._cache),
            attention,
            self._cache,
            num_blocks=num_blocks,
            scratch_per_line=self._scratch_per_line,
        )

    def start(self, sequence: Sequence) -> None:
        """Know the sequence."""
        self._ledger.start(sequence)

    def propose(self, context: DraftContext) -> list[Draft]:
        """Write the entries of what is new, then draft, all sequences together."""
        lines = [self._line(number, context) for number in range(len(context.requests))]
        wanted = [line for line in lines if line.is_wanted]
        if not wanted:
            return [NO_DRAFT] * len(lines)
        self._write_context(wanted, context.features)
        drafts = iter(self._draft(wanted))
        return [next(drafts) if line.is_wanted else NO_DRAFT for line in lines]

    def stop(self, sequence: Sequence) -> None:
        """Forget the sequence."""
        self._ledger.stop(sequence)

    def _line(self, number: int, context: DraftContext) -> Line:
        request = context.requests[number]
        start = self._ledger.num_valid(request.sequence, request.block_ids.tolist(), request.num_computed)
        return self._passes.line(number, request, start=start, longest=self._max_model_len)

    def _write_context(self, lines: Listing[Line], features: Mapping[str, Tensor]) -> None:
        """The entries of the places that the target has computed since, of all lines; of long texts part by part."""
        places = [np.arange(line.start, line.request.num_computed) for line in lines]
        blocks = [line.table[own // self._block_size] for line, own in zip(lines, places, strict=True)]
        positions = np.concatenate(places)
        slots = np.concatenate(blocks).astype(np.int64) * self._block_size + positions % self._block_size
        for first in range(0, len(slots), MOST_ROWS):
            rows = slice(first, first + MOST_ROWS)
            self._write(self._tensor(slots[rows]), self._tensor(positions[rows]), features)
        for line in lines:
            request = line.request
            self._ledger.note(request.sequence, request.block_ids.tolist(), line.start, request.num_computed)

    def _write(self, slots: Tensor, positions: Tensor, features: Mapping[str, Tensor]) -> None:
        entries = self._head.context([features[name].index_select(0, slots) for name in self._head.needs], positions)
        for kept, new in zip(self._cache.layers, entries, strict=True):
            kept.key.index_copy_(0, slots, new.key.to(kept.key.dtype))
            kept.value.index_copy_(0, slots, new.value.to(kept.value.dtype))

    def _draft(self, lines: Listing[Line]) -> list[Draft]:
        """Predict all tokens of all blocks in one pass."""
        rows = [self._block(line) for line in lines]
        logits = torch.split(self._passes.forward(rows).logits, [own.num_wanted for own in rows])
        return chains_from(self._choice, lines, logits)

    def _block(self, line: Line) -> Rows:
        """The last committed token, of which the target has computed nothing yet, and masks; each sees all."""
        place = line.request.num_computed
        (anchor,) = line.request.sequence.tokens_from(place)
        num_tokens = min(line.max_tokens, line.max_depth)
        token_ids = self._head.block(anchor, num_tokens)
        mask = torch.ones(len(token_ids), len(token_ids), dtype=torch.bool)
        return Rows(line=line, token_ids=token_ids, start=place, num_wanted=num_tokens, mask=mask)

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._head.device)


class BlockPredictor:
    """The head as a `Predictor` of blocks; the entries before them lie in the cache already."""

    num_hidden = 0

    def __init__(self, head: DFlashHead, attention: Attention, cache: KVCache) -> None:
        self.needs = frozenset(head.needs)
        self.kv_specs = head.kv_specs
        self.dtype = head.dtype
        self.device = head.device
        self.max_model_len = head.max_model_len
        self.target_ids = head.target_ids
        self._head = head
        self._attention = attention
        self._cache = cache

    def read_states(self, features: Mapping[str, Tensor], slots_before: Tensor) -> None:
        """A block's rows are tokens and nothing else."""

    def predict(self, batch: ForwardBatch, states: Tensor | None, attend: Attend) -> Prediction:  # noqa: ARG002
        """See `Predictor`."""
        causal = self._causal(batch) if self._head.has_causal_layers else attend
        outputs = self._head.forward(batch.token_ids, batch.positions, attend, causal)
        return Prediction(self._head.logits(outputs.index_select(0, batch.logits_rows)))

    def _causal(self, batch: ForwardBatch) -> Attend:
        sequences = [replace(rows, tree_mask=None) for rows in batch.sequences]
        return self._attention.begin(replace(batch, sequences=sequences), self._cache)
