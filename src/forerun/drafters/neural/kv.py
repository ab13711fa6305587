"""KV entries of a drafter's own, in the target's blocks, and the drafter that writes with them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field

from torch import Tensor

from forerun.core.draft import Draft
from forerun.core.integers import check_integer
from forerun.core.sequence import Sequence
from forerun.drafters.base import DraftContext, DraftRequest, TargetInfo
from forerun.drafters.device_chains import DeviceChains
from forerun.drafters.neural.device import ChainNetwork, device_chains
from forerun.drafters.neural.device_masks import device_masks
from forerun.drafters.neural.device_trees import device_trees
from forerun.drafters.neural.forward import DraftSequence, PagedPasses, Predictor, scratch_blocks_per_sequence
from forerun.drafters.neural.writers import Writer
from forerun.errors import ConfigError
from forerun.kv.cache import KVCache, bytes_per_block
from forerun.kv.prefix_cache import block_digests, root_digest
from forerun.ops.cuda.table import DeviceTable, RuleTable
from forerun.ops.native.attention import block_table


@dataclass(slots=True)
class _SequenceRecord:
    """The ledger's record of one sequence."""

    root: bytes  # the digest that those of the blocks start from
    digests: list[bytes] = field(default_factory=list)  # of its full blocks
    num_noted: int = 0  # entries that `note` was last called for
    partial_stamp: int = -1  # of the last block, if it is not full


class KVLedger:
    """Knows for how much of a sequence's text a drafter has KV entries, whatever the blocks were used for since.

    The target's blocks change hands without notice: by a hit in the prefix cache, a preemption, another
    sequence. So the ledger keeps a stamp for each block, of what the drafter wrote to it last: the
    digest of a full block's text, or a number that only the writer of a partial block knows. Only
    blocks with the right stamp count.
    """

    def __init__(self, num_blocks: int, *, block_size: int) -> None:
        self._block_size = block_size
        self._stamps: list[bytes | int | None] = [None] * num_blocks
        self._records: dict[int, _SequenceRecord] = {}  # by seq_id
        self._partial_stamps = itertools.count()

    def start(self, sequence: Sequence) -> None:
        """Add a new sequence."""
        self._records[sequence.seq_id] = _SequenceRecord(root_digest(sequence.cache_salt))

    def knows(self, sequence: Sequence) -> bool:
        """Whether a sequence was added."""
        return sequence.seq_id in self._records

    def stop(self, sequence: Sequence) -> None:
        """Forget a sequence; the entries in its full blocks remain valid for others."""
        del self._records[sequence.seq_id]

    def num_valid(self, sequence: Sequence, block_ids: Listing[int], num_computed: int) -> int:
        """The number of leading tokens of `sequence`, at most `num_computed`, whose entries are in `block_ids`."""
        record, size = self._records[sequence.seq_id], self._block_size
        self._extend(record, sequence, num_computed // size)
        first = (
            min(record.num_noted, num_computed) // size
        )  # the blocks before it are compared at once, as most are right
        if list(map(self._stamps.__getitem__, block_ids[:first])) != record.digests[:first]:
            first = 0
        for i, block in enumerate(block_ids[first : -(-num_computed // size)], first):
            stamp = self._stamps[block]
            if stamp == record.partial_stamp and i == record.num_noted // size:
                return min(record.num_noted, num_computed)
            if i >= len(record.digests) or stamp != record.digests[i]:
                return i * size
        return num_computed

    def note(self, sequence: Sequence, block_ids: Listing[int], start: int, end: int) -> None:
        """Note that the tokens at [start, end) now have entries in `block_ids`, as those before them had."""
        record, size = self._records[sequence.seq_id], self._block_size
        num_full = end // size
        record.num_noted = end
        self._extend(record, sequence, num_full)
        for i in range(start // size, num_full):
            self._stamps[block_ids[i]] = record.digests[i]
        if end % size:
            record.partial_stamp = self._stamps[block_ids[num_full]] = next(self._partial_stamps)

    def holds(self, block: int, digest: bytes) -> bool:
        """Whether a full block has the entries of the text with this digest."""
        return self._stamps[block] == digest

    def note_block(self, block: int, digest: bytes) -> None:
        """Note that a block has got the entries of the text with this digest from elsewhere."""
        self._stamps[block] = digest

    def _extend(self, record: _SequenceRecord, sequence: Sequence, num_full: int) -> None:
        """Compute the digests of the first `num_full` blocks."""
        first = len(record.digests)
        if num_full > first:
            tokens = sequence.tokens_between(first * self._block_size, num_full * self._block_size)
            parent = record.digests[-1] if record.digests else record.root
            record.digests += block_digests(parent, tokens, block_size=self._block_size)


@dataclass(frozen=True, slots=True)
class LedgerKV:
    """A cache and the ledger that knows what is in it; see `BlockKV`."""

    cache: KVCache
    ledger: KVLedger

    def holds(self, block: int, digest: bytes) -> bool:
        """See `KVLedger`."""
        return self.ledger.holds(block, digest)

    def note_block(self, block: int, digest: bytes) -> None:
        """See `KVLedger`."""
        self.ledger.note_block(block, digest)


class KVDrafter:
    """A drafter with a predictor that keeps its KV in the target's blocks, under the same ids.

    Before it drafts it reads the part of a text that it has not read yet: where it was not asked for a
    while, where a prefix came from the cache, or where a preemption took the blocks. The ledger knows
    which part that is. Only entries of committed tokens count there; what a draft leaves in the cache
    is overwritten.

    In one step it reads no more unread tokens than the target may read (`max_num_batched_tokens`), and
    drafts for a sequence once it has read all of it. So a long prompt lengthens no step beyond that.
    """

    num_scratch_blocks = 0  # its drafts are written to its own cache

    def __init__(self, predictor: Predictor, target: TargetInfo, writer: Writer, *, max_model_len: int) -> None:
        self.needs = predictor.needs
        self.kv_bytes_per_block = bytes_per_block(
            predictor.kv_specs, block_size=target.block_size, dtype=predictor.dtype
        )
        self._scratch_per_sequence = scratch_blocks_per_sequence(writer.num_places, block_size=target.block_size)
        self._num_scratch_blocks = self._scratch_per_sequence * target.max_num_seqs
        self.scratch_bytes = self._num_scratch_blocks * self.kv_bytes_per_block
        self._predictor = predictor
        self._target = target
        self._writer = writer
        self._max_model_len = max_model_len

    def use_kv(self, target_cache: KVCache, *, num_blocks: int) -> None:
        """Make a cache with an entry for each of the target's places, and scratch blocks behind them."""
        block_size = target_cache.block_size
        self._ledger = KVLedger(num_blocks, block_size=block_size)
        self._cache = KVCache(
            self._predictor.kv_specs,
            num_blocks=num_blocks + self._num_scratch_blocks,
            block_size=block_size,
            dtype=self._predictor.dtype,
            device=self._predictor.device,
        )
        self._attention = self._target.itself.attention_for(self._predictor.kv_specs)
        self._passes = PagedPasses(
            self._predictor,
            self._attention,
            self._cache,
            num_blocks=num_blocks,
            scratch_per_sequence=self._scratch_per_sequence,
        )

    def on_device(self, table: DeviceTable, rules: RuleTable, sample: Callable[..., None]) -> DeviceChains | None:
        """See `DraftsOnDevice`: chains and trees of a network that reads tensors alone."""
        given = (self._network(), self._writer, table, rules, sample)
        return device_chains(*given) or device_trees(*given) or device_masks(*given)

    def _network(self) -> ChainNetwork:
        """The network and its KV, as they are on the device."""
        return ChainNetwork(
            predictor=self._predictor,
            attention=self._attention,
            cache=self._cache,
            num_blocks=self._cache.num_blocks - self._num_scratch_blocks,
            scratch_per_slot=self._scratch_per_sequence,
            max_model_len=self._max_model_len,
            entries=self._ledger,
            most_unread=self._target.num_speculative_tokens + 2,  # those that a step commits, and the one before them
        )

    @property
    def moved_kv(self) -> Listing[LedgerKV]:
        """See `MovesKV`."""
        return [LedgerKV(self._cache, self._ledger)]

    def start(self, sequence: Sequence) -> None:
        """Add the sequence to the ledger."""
        self._ledger.start(sequence)

    def num_unread(self, request: DraftRequest) -> int:
        """See `ReadsTexts`: the tokens without entries; none count where the text is too long for drafts."""
        if len(request.sequence) >= self._max_model_len:
            return 0
        num_read = self._ledger.num_valid(request.sequence, block_table(request.block_ids), request.num_computed)
        return max(0, request.num_computed - max(num_read, self._predictor.num_hidden))

    def propose(self, context: DraftContext) -> list[Draft]:
        """Read what is unread, then draft for all sequences together."""
        tables = [block_table(request.block_ids) for request in context.requests]
        starts = [
            self._ledger.num_valid(request.sequence, table, request.num_computed)
            for request, table in zip(context.requests, tables, strict=True)
        ]
        sequences = [
            self._passes.sequence(number, request, table, num_read=start, max_model_len=self._max_model_len)
            for number, (request, table, start) in enumerate(zip(context.requests, tables, starts, strict=True))
        ]
        asked = [sequence.wants_draft for sequence in sequences]
        self._catch_up([sequence for sequence in sequences if sequence.wants_draft], context.features)
        drafts = self._writer.write(self._passes, sequences, context.features)
        for sequence, table, start, was_asked in zip(sequences, tables, starts, asked, strict=True):
            end = sequence.request.num_computed if sequence.wants_draft else sequence.num_read
            if was_asked and end > start:
                self._ledger.note(sequence.request.sequence, table, start, end)
        return drafts

    def stop(self, sequence: Sequence) -> None:
        """Forget the sequence."""
        self._ledger.stop(sequence)

    def _catch_up(self, sequences: Listing[DraftSequence], hidden_states: Mapping[str, Tensor]) -> None:
        """Spend the step's budget of unread tokens, earlier requests first; a sequence that stays behind gets no draft.

        The tokens that the last step committed cost nothing of the budget: to read them is part of drafting.
        """
        num_left = self._target.max_num_batched_tokens
        for sequence in sequences:
            num_unread = sequence.request.num_computed - sequence.num_read
            if num_unread <= self._target.num_speculative_tokens:
                continue
            if num_unread > num_left:
                sequence.max_tokens = 0
                self._read_until(sequence, sequence.num_read + num_left, hidden_states)
            num_left -= min(num_unread, num_left)

    def _read_until(self, sequence: DraftSequence, end: int, hidden_states: Mapping[str, Tensor]) -> None:
        """Make the entries of the committed tokens before place `end`."""
        self._passes.read_until(sequence, end, hidden_states)


def check_max_model_len(asked: int | None) -> None:
    """Raise `ConfigError` unless a drafter's `max_model_len` is a length or None."""
    if asked is not None:
        check_integer("max_model_len (of the drafter)", asked, least=1, do="leave it out for its checkpoint's")


def resolve_max_model_len(asked: int | None, *, allowed: int) -> int:
    """The length of text (tokens) beyond which a drafter gives no drafts.

    Raises:
        ConfigError: the user asks for more than the checkpoint allows.
    """
    if asked is not None and asked > allowed:
        raise ConfigError(
            f"max_model_len (of the drafter): got {asked}; its checkpoint allows at most {allowed}; lower it"
        )
    return asked or allowed
