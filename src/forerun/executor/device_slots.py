"""The host's side of the device's table: who has which slot, and what is written when a sequence gets one."""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.sampling_params import GREEDY_BELOW, SamplingParams
from forerun.core.sequence import Sequence
from forerun.core.step import NO_BLOCKS, SequenceSpec
from forerun.errors import RequestError
from forerun.executor.host_copies import to_device
from forerun.executor.row_masks import packed
from forerun.executor.slot_values import SlotValues
from forerun.ops.cuda.table import (
    BLOCK_TABLE,
    COMPUTED,
    DRAFT_PARENTS,
    DRAFT_SIZES,
    DRAFT_TOKENS,
    HAS_ALLOWED,
    HAS_BIAS,
    HAS_MIN_LENGTH,
    HAS_PENALTIES,
    DeviceTable,
    RuleTable,
)
from forerun.ops.penalties import penalises
from forerun.ops.truncation import floor_of

Ints = npt.NDArray[np.int32]

MOST_STOP_IDS = 64
MOST_BIASES = 320  # OpenAI allows 300

OF_TEXTS = ("lengths", "ended", "draft_sizes")
OF_RULES = (
    *("flags", "seeds", "temperature", "floor", "top_k", "top_p", "repetition", "frequency", "presence"),
    *("min_length", "max_length", "stop_ids"),
)
"""What every new sequence has in the tables beside its tokens: it is written for all of a step at once."""


def check_device_rules(spec: SequenceSpec) -> None:
    """Refuse what the device's tables have no room for.

    Raises:
        RequestError: a sampling value that only the host can follow.
    """
    sampling, num_stops = spec.sampling, len(spec.stop_token_ids)
    if sampling.logits_processors:
        raise RequestError(
            "logits_processors: an engine that steps on the device cannot follow them; leave them out, or start it with device_step=False"
        )
    if sampling.logit_bias and len(sampling.logit_bias) > MOST_BIASES:
        raise RequestError(
            f"logit_bias: got {len(sampling.logit_bias)} tokens; with device_step=True there may be {MOST_BIASES}; name fewer"
        )
    if num_stops > MOST_STOP_IDS:
        raise RequestError(
            f"stop_token_ids: got {num_stops}, those of the model included; with device_step=True there may be "
            f"{MOST_STOP_IDS}; name fewer"
        )


@dataclass(slots=True)
class Holder:
    """Who has a slot, and what the table holds of it, as far as the host has read."""

    sequence: Sequence
    num_tokens: int
    num_computed: int
    blocks: npt.NDArray[np.int32] = field(default_factory=lambda: NO_BLOCKS)
    draft: Draft = NO_DRAFT


class DeviceSlots:
    """Gives sequences slots of the table, and writes there what the device cannot know.

    A slot holds nothing that the host does not know too when it has read the results of all steps, so a sequence that is not
    in a step may lose its own to one that is: it gets another when it runs again. What the table holds of a sequence in a
    step that was not read is right without the host: it writes nothing there but blocks.

    Args:
        num_slots: at least as many as a step has sequences.
        max_length: tokens of the longest text.
        block_size: places in a block of the cache.
        most_drafted: nodes of the largest draft.
        vocab_size: width of the logits.
        device: where the table lies.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        max_length: int,
        block_size: int,
        most_drafted: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        table = DeviceTable.empty(
            num_slots,
            max_length=max_length,
            num_blocks=-(-(max_length + most_drafted) // block_size) + 1,
            most_drafted=most_drafted,
            device=device,
        )
        rules = RuleTable.empty(
            num_slots, vocab_size, device=device, most_stop_ids=MOST_STOP_IDS, most_biases=MOST_BIASES
        )
        self._values = SlotValues(
            {name: getattr(table, name) for name in OF_TEXTS} | {name: getattr(rules, name) for name in OF_RULES}
        )
        self.table = replace(table, **{name: self._values.tensors[name] for name in OF_TEXTS})
        self.rules = replace(rules, **{name: self._values.tensors[name] for name in OF_RULES})
        self.num_slots = num_slots
        self._vocab_size = vocab_size
        self._device = device
        self._free = list(range(num_slots))
        self._slot_of: dict[int, int] = {}  # seq_id -> slot, those that ran longest ago first
        self._holders: dict[int, Holder] = {}  # by seq_id
        self._changes: dict[tuple[int, int, int], int] = {}  # (of what, slot, column): the value that is to be sent

    @property
    def num_free(self) -> int:
        """Slots that no sequence has."""
        return len(self._free)

    def take(self, sequences: Listing[tuple[Sequence, SequenceSpec]]) -> list[int]:
        """The slots of a step's sequences, whose texts and rules lie there afterwards."""
        running = {sequence.seq_id for sequence, _ in sequences}
        new: list[Sequence] = []
        self._values.forget()
        for sequence, spec in sequences:
            seq_id = sequence.seq_id
            slot = self._slot_of.pop(seq_id, None)
            if slot is None:
                slot = self._free.pop() if self._free else self._take_from_one_that_waits(running)
            self._slot_of[seq_id] = slot
            if not self.has_text(sequence):
                self._holders.pop(seq_id, None)
                self._write(slot, sequence, spec)
                new.append(sequence)
        self._values.send()
        self._holders.update((sequence.seq_id, Holder(sequence, len(sequence), -1)) for sequence in new)
        return [self._slot_of[sequence.seq_id] for sequence, _ in sequences]

    def has_text(self, sequence: Sequence) -> bool:
        """Whether the table holds a sequence's text, as long as the host knows it, or what has become of that since."""
        holder = self._holders.get(sequence.seq_id)
        return holder is not None and holder.sequence is sequence and holder.num_tokens == len(sequence)

    def place_blocks(self, seq_id: int, blocks: npt.NDArray[np.int32]) -> None:
        """Note which blocks a sequence has, for the device to be told."""
        holder = self._holders[seq_id]
        blocks = blocks[: self.table.block_table.shape[1]]
        if holder.blocks.tobytes() != blocks.tobytes():
            slot, num_known = self._slot_of[seq_id], min(len(holder.blocks), len(blocks))
            new = [*np.flatnonzero(holder.blocks[:num_known] != blocks[:num_known]), *range(num_known, len(blocks))]
            self._changes.update(((BLOCK_TABLE, slot, int(at)), int(blocks[at])) for at in new)
            holder.blocks = blocks.copy()

    def place(self, seq_id: int, *, start: int, draft: Draft) -> None:
        """Note where a sequence's rows begin, and its draft, for the device to be told where it does not know better."""
        slot, holder, changes = self._slot_of[seq_id], self._holders[seq_id], self._changes
        if holder.num_computed != start:
            changes[COMPUTED, slot, 0] = holder.num_computed = start
        num_nodes = len(draft)
        held = holder.draft.first(num_nodes)  # a step verifies no more of it than the plan says
        if (held.token_ids, held.parents) != (draft.token_ids, draft.parents):
            changes[DRAFT_SIZES, slot, 0] = num_nodes
            parents = range(-1, num_nodes - 1) if draft.parents is None else draft.parents
            for node, (token_id, parent) in enumerate(zip(draft.token_ids, parents, strict=True)):
                changes[DRAFT_TOKENS, slot, node], changes[DRAFT_PARENTS, slot, node] = token_id, parent
            holder.draft = draft if draft.probs is None else replace(draft, probs=None)

    def changes(self) -> Ints:
        """What was noted and not sent yet, as `ops.cuda.steps.place` takes it: [4, n]."""
        return np.array([(*at, value) for at, value in self._changes.items()], dtype=np.int32).reshape(-1, 4).T

    def changes_are_sent(self) -> None:
        """After the device was told `changes`."""
        self._changes.clear()

    def forget_texts(self, seq_ids: Listing[int]) -> list[Holder]:
        """Before the device changes these sequences: were it interrupted, their texts would be written again."""
        return [holder for seq_id in seq_ids if (holder := self._holders.pop(seq_id, None)) is not None]

    def trust_texts(self, holders: Listing[Holder]) -> None:
        """After all that changes these sequences is queued: what the table holds of them is right, if not known yet."""
        self._holders.update((holder.sequence.seq_id, holder) for holder in holders)

    def know_text(self, holder: Holder, *, num_computed: int, draft: Draft) -> None:
        """After the host has read that the device has changed a sequence so, and has drafted this for it."""
        holder.num_tokens, holder.num_computed, holder.draft = len(holder.sequence), num_computed, draft

    def release(self, seq_id: int) -> None:
        """Free the slot of a sequence that has ended; it may have none."""
        self._holders.pop(seq_id, None)
        slot = self._slot_of.pop(seq_id, None)
        if slot is not None:
            self._free.append(slot)

    def _take_from_one_that_waits(self, running: set[int]) -> int:
        seq_id = next(seq_id for seq_id in self._slot_of if seq_id not in running)
        self._holders.pop(seq_id, None)
        return self._slot_of.pop(seq_id)

    def _write(self, slot: int, sequence: Sequence, spec: SequenceSpec) -> None:
        sampling, note = spec.sampling, self._values.note
        for at in [at for at in self._changes if at[1] == slot]:  # of who had the slot before
            del self._changes[at]
        self.table.tokens[slot, : len(sequence)] = self._ints(sequence.tokens_from(0))
        note("lengths", slot, len(sequence))
        note("ended", slot, 0)
        note("draft_sizes", slot, 0)
        seed = spec.seed & ((1 << 64) - 1)
        note("seeds", slot, seed - (seed >> 63 << 64))
        note("temperature", slot, 0.0 if sampling.temperature < GREEDY_BELOW else sampling.temperature)
        note("floor", slot, floor_of(sampling.min_p))
        # top_k and min_length are cut for int32, which changes nothing: no vocabulary is larger, and no text longer.
        note("top_k", slot, min(max(sampling.top_k, 0), self._vocab_size))
        note("top_p", slot, sampling.top_p)
        note("repetition", slot, sampling.repetition_penalty)
        note("frequency", slot, sampling.frequency_penalty)
        note("presence", slot, sampling.presence_penalty)
        note("min_length", slot, min(len(spec.prompt_ids) + sampling.min_tokens, spec.max_length + 1))
        note("max_length", slot, spec.max_length)
        stop_ids = sorted(token_id for token_id in spec.stop_token_ids if 0 <= token_id < self._vocab_size)
        note("stop_ids", slot, stop_ids + [-1] * (MOST_STOP_IDS - len(stop_ids)))
        note("flags", slot, self._write_edits(slot, sequence, spec, sampling))

    def _write_edits(self, slot: int, sequence: Sequence, spec: SequenceSpec, sampling: SamplingParams) -> int:
        """What the edits of a sequence need; returns its flags."""
        rules, flags = self.rules, 0
        if sequence.output_ids:
            counts = np.bincount(np.array(sequence.output_ids, dtype=np.int64), minlength=self._vocab_size)
            rules.counts[slot] = self._ints(counts)
        else:  # nothing to send, and a vocabulary is long
            rules.counts[slot] = 0
        if penalises(sampling):
            flags |= HAS_PENALTIES
            # Frequency and presence count the output alone.
            rules.in_prompt[slot] = self._mask(spec.prompt_ids if sampling.repetition_penalty != 1.0 else ())
        if sampling.logit_bias:
            flags |= HAS_BIAS
            self._fill(rules.bias_ids, slot, list(sampling.logit_bias), -1)
            self._fill(rules.bias_values, slot, list(sampling.logit_bias.values()), 0.0)
        if (allowed := sampling.allowed_ascending) is not None:
            flags |= HAS_ALLOWED
            rules.allowed[slot] = self._mask(allowed)
        if sampling.min_tokens and spec.stop_token_ids:
            flags |= HAS_MIN_LENGTH
        return flags

    def _fill(self, padded: Tensor, slot: int, values: Listing[int] | Listing[float], padding: float) -> None:
        padded[slot] = padding
        numbers = np.array(values, dtype=np.float32 if padded.is_floating_point() else np.int32)
        padded[slot, : len(values)] = to_device(numbers, self._device)

    def _mask(self, token_ids: npt.ArrayLike) -> Tensor:
        """[W] int32: bit t % 32 of word t // 32 for each token t."""
        bits = np.zeros(-(-self._vocab_size // 32) * 32, dtype=np.uint8)
        bits[np.asarray(token_ids, dtype=np.int64)] = 1
        return to_device(packed(bits), self._device)

    def _ints(self, values: Listing[int] | range | npt.NDArray[Any]) -> Tensor:
        return to_device(np.array(values, dtype=np.int32), self._device)
