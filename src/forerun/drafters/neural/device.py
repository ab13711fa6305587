"""Chains that a device drafts after the texts in its table: a network's passes without a word from the host.

`drafters.neural.device_trees` has the trees, `device_masks` what one pass over masks predicts, `device_hidden` the drafts of networks
without KV.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Listing
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from forerun.core.batch import ForwardBatch
from forerun.core.sequence import Sequence
from forerun.drafters.base import DraftRequest
from forerun.drafters.neural.device_picks import DevicePicks
from forerun.drafters.neural.device_texts import lengths_of
from forerun.drafters.neural.forward import Prediction, Predictor
from forerun.drafters.neural.sampling import DraftSampler
from forerun.drafters.neural.writers import ChainWriter, Writer
from forerun.kv.cache import KVCache
from forerun.ops.attention import Attention
from forerun.ops.cuda.chains import ChainPlan
from forerun.ops.cuda.functions import modules_for
from forerun.ops.cuda.passes import DeviceAttention, DevicePass
from forerun.ops.cuda.table import DeviceTable, RuleTable, StepRows


class ChainFunctions(NamedTuple):
    """Those of `ops.cuda.chains`, or the kernels of the same names."""

    take_blocks: Callable[..., None]
    read_texts: Callable[..., None]
    place_masks: Callable[..., None]
    extend: Callable[..., None]
    write_chains: Callable[..., None]

    @classmethod
    def choose(cls, device: torch.device) -> ChainFunctions:
        """The kernels on a GPU, the formulas elsewhere.

        Raises:
            ConfigError: triton is not installed.
        """
        (chains,) = modules_for(device, "chains")
        return cls.of(chains)

    @classmethod
    def of(cls, chains: Any) -> ChainFunctions:
        """Those of a module."""
        return cls(chains.take_blocks, chains.read_texts, chains.place_masks, chains.extend, chains.write_chains)


class KnownEntries(Protocol):
    """Who knows how much of a text a network has read: a `KVLedger`, or nobody where that is the target's own KV."""

    def knows(self, sequence: Sequence) -> bool:
        """Whether it has heard of a sequence."""
        ...

    def num_valid(self, sequence: Sequence, block_ids: Listing[int], num_computed: int) -> int:
        """The number of leading tokens, at most `num_computed`, that the network has read."""
        ...

    def note(self, sequence: Sequence, block_ids: Listing[int], start: int, end: int) -> None:
        """Note that the tokens at [start, end) have been read, as those before them had."""
        ...


class TargetsEntries:
    """What is known where a network's KV is the target's own: it lacks nothing."""

    def knows(self, sequence: Sequence) -> bool:  # noqa: ARG002
        """See `KnownEntries`."""
        return True

    def num_valid(self, sequence: Sequence, block_ids: Listing[int], num_computed: int) -> int:  # noqa: ARG002
        """See `KnownEntries`."""
        return num_computed

    def note(self, sequence: Sequence, block_ids: Listing[int], start: int, end: int) -> None:
        """See `KnownEntries`."""


class ChainNetwork(NamedTuple):
    """A network and its KV: the target's blocks, `num_blocks`, then scratch blocks, `scratch_per_slot` for each slot."""

    predictor: Predictor
    attention: Attention
    cache: KVCache
    num_blocks: int
    scratch_per_slot: int
    max_model_len: int
    entries: KnownEntries
    most_unread: (
        int  # rows of a text that are read again or anew, at most: its last token's, and more where it keeps KV
    )


def device_chains(
    network: ChainNetwork, writer: Writer, table: DeviceTable, rules: RuleTable, sample: Callable[..., None]
) -> DeviceChainWriter | None:
    """Draft on the device what a writer would, where it writes chains and the network needs no host; else None."""
    if (
        not isinstance(writer, ChainWriter)
        or writer.num_runners_up  # a tree
        or not isinstance(network.attention, DeviceAttention)
        or not network.predictor.reads_tensors_only
    ):
        return None
    return DeviceChainWriter(network, network.attention, writer.sampler, table, rules, sample, depth=writer.num_places)


class NetworkChains(ABC):
    """Implements `DeviceChains` with a network whose passes read nothing but tensors on the device; subclasses write the drafts.

    A step's drafting reads the tokens that the step committed, and the one before them once more, in a pass of as many rows
    for each sequence, some of them padding. So shapes depend on the number of sequences and on the longest draft alone. No
    draft is deeper than `depth`, and so no step commits more than a path of that length and one token.
    """

    writes_trees = False

    def __init__(
        self,
        network: ChainNetwork,
        attention: DeviceAttention,
        sampler: DraftSampler,
        table: DeviceTable,
        rules: RuleTable,
        sample: Callable[..., None],
        *,
        depth: int,
    ) -> None:
        # the token before those that a step commits is read again
        self._network = network._replace(most_unread=min(network.most_unread, depth + 2))
        self._depth = depth
        self._attention = attention
        self._table = table
        self._picks = DevicePicks(sampler, rules, sample)
        self._functions = ChainFunctions.choose(table.tokens.device)
        num_slots, num_blocks = table.block_table.shape
        self._blocks = torch.zeros(
            (num_slots, num_blocks + network.scratch_per_slot), dtype=torch.int32, device=table.tokens.device
        )
        self._reading: set[int] = set()  # seq_ids of texts that the device reads to their end in the step begun last

    def may_draft(self, request: DraftRequest, *, is_pending: bool) -> bool:
        """See `DeviceChains`: where the network has read all before the step, and rules change no logit."""
        seq_id = request.sequence.seq_id
        has_read = seq_id in self._reading if is_pending else self._has_read(request)
        may = request.max_tokens > 0 and has_read and self._picks.may_pick(request)
        (self._reading.add if may else self._reading.discard)(seq_id)
        return may

    def _has_read(self, request: DraftRequest) -> bool:
        """Whether the network has entries of all tokens but the last."""
        entries, sequence = self._network.entries, request.sequence
        if not entries.knows(sequence):
            return False
        return entries.num_valid(sequence, request.block_ids.tolist(), request.num_computed) == request.num_computed

    def note(self, request: DraftRequest, *, start: int) -> None:
        """See `DeviceChains`; a sequence that was stopped since is no longer known."""
        sequence, entries = request.sequence, self._network.entries
        was_read = min(request.max_depth, self._network.max_model_len - len(sequence)) > 0
        if was_read and entries.knows(sequence):
            entries.note(sequence, request.block_ids.tolist(), start, request.num_computed)

    def forget(self, seq_id: int) -> None:
        """See `DeviceChains`."""
        self._reading.discard(seq_id)

    @abstractmethod
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

    def _depths(self, slots: Tensor, depths: Tensor) -> Tensor:
        """[N] int32, how deep drafts may be that do not go beyond the longest text of the network."""
        room = self._network.max_model_len - lengths_of(self._table, slots)
        return torch.minimum(depths, room).clamp(0, self._depth).int()

    def _begin(self, slots: Tensor, limits: Tensor, num_computed: Tensor) -> ChainPlan:
        """What is drafted, with the blocks of each text and scratch blocks behind them; see `ChainPlan`."""
        network, lengths = self._network, lengths_of(self._table, slots)
        starts = torch.maximum(num_computed, lengths - network.most_unread).clamp(min=network.predictor.num_hidden)
        plan = ChainPlan(slots=slots, starts=starts.int(), limits=limits, blocks=self._blocks)
        self._functions.take_blocks(
            *(plan, self._table),
            block_size=network.cache.block_size,
            first_scratch=network.num_blocks,
            scratch_per_slot=network.scratch_per_slot,
        )
        return plan

    def _read(self, plan: ChainPlan, features: Mapping[str, Tensor]) -> tuple[StepRows, Tensor | None, Tensor]:
        """The rows of the texts' unread tokens, the states to read them with, and the last row of each text [N]."""
        rows, last_rows, slots_before = self._unread(plan, self._network.most_unread)
        return rows, self._network.predictor.read_states(features, slots_before), last_rows

    def _unread(self, plan: ChainPlan, count: int) -> tuple[StepRows, Tensor, Tensor]:
        """`count` rows of each text from `starts` on, its last row [N], and where the tokens before them lie."""
        rows, last_rows = self._rows(len(plan.slots) * count), torch.empty_like(plan.slots, dtype=torch.int64)
        slots_before = torch.empty_like(rows.kv_slots)
        self._functions.read_texts(
            plan, self._table, rows, last_rows, slots_before, block_size=self._network.cache.block_size
        )
        return rows, last_rows, slots_before

    def _rows(self, count: int, *, longest_path: int = 1) -> StepRows:
        return StepRows.empty(count, 0, longest_path=longest_path, device=self._table.tokens.device)

    def _predict(self, rows: StepRows, states: Tensor | None, at: Tensor) -> Prediction:
        """Compute the rows of a pass, and predict after those that `at` lists."""
        return self._network.predictor.predict(self._batch(rows, at), states, self._attend(rows))

    def _batch(self, rows: StepRows, at: Tensor) -> ForwardBatch:
        first = self._network.predictor.num_hidden  # padding rows are there, where any row may be
        return ForwardBatch(
            token_ids=rows.tokens.long(),
            positions=rows.positions.long().clamp(min=first),
            slot_mapping=rows.kv_slots,
            sequences=[],
            block_size=self._network.cache.block_size,
            logits_rows=at,
        )

    def _attend(self, rows: StepRows) -> DevicePass:
        network = self._network
        return self._attention.begin_step(rows, self._blocks, network.cache, num_hidden=network.predictor.num_hidden)


class DeviceChainWriter(NetworkChains):
    """Writes one token after the other, each in a pass of one row."""

    def propose(
        self,
        slots: Tensor,
        limits: Tensor,  # noqa: ARG002 - a chain has as many tokens as it is deep
        depths: Tensor,
        num_computed: Tensor,
        features: Mapping[str, Tensor],
        *,
        most_tokens: int,
    ) -> None:
        """See `DeviceChains`."""
        plan = self._begin(slots, self._depths(slots, depths), num_computed)
        rows, states, last_rows = self._read(plan, features)
        for depth in range(min(most_tokens, self._depth)):
            predicted = self._predict(rows, states, last_rows)
            drafted = self._picks.tokens(predicted.logits, rows.slots[last_rows], rows.positions[last_rows])
            rows, last_rows = self._rows(len(slots)), torch.arange(len(slots), device=slots.device)
            states = predicted.states
            self._functions.extend(
                plan, self._table, drafted, rows, depth=depth, block_size=self._network.cache.block_size
            )
