"""Which of the target's KV blocks hold a drafter's entries of which text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field

from forerun.core.sequence import Sequence
from forerun.kv.prefix_cache import block_digests, root_digest


@dataclass(slots=True)
class _Known:
    """What is known of one sequence: the digests of its full blocks, how many entries were noted last, the stamp of the last block if it is not full."""

    root: bytes
    digests: list[bytes] = field(default_factory=list)
    num_noted: int = 0
    partial_stamp: int = -1


class KVLedger:
    """Says how much of a sequence's text a drafter has entries for, whatever has become of the blocks since.

    Blocks change hands without notice: a prefix found in the cache, a preemption, another sequence.
    So each block carries a stamp of what the drafter wrote to it last, the digest of a full block's
    text or a number that only the writer of a partial one knows, and only what bears the right stamp
    counts. Entries that were never written, as where a sequence was not drafted for, are written when
    they are wanted.
    """

    def __init__(self, num_blocks: int, *, block_size: int) -> None:
        self._block_size = block_size
        self._stamps: list[bytes | int | None] = [None] * num_blocks
        self._known: dict[int, _Known] = {}  # by seq_id
        self._partial_stamps = itertools.count()

    def start(self, sequence: Sequence) -> None:
        """Know a new sequence."""
        self._known[sequence.seq_id] = _Known(root_digest(sequence.cache_salt))

    def stop(self, sequence: Sequence) -> None:
        """Forget a sequence; what its full blocks hold is still good for others."""
        del self._known[sequence.seq_id]

    def num_valid(self, sequence: Sequence, block_ids: Listing[int], num_computed: int) -> int:
        """Leading tokens of `sequence`, at most `num_computed`, whose entries are in `block_ids`."""
        known, size = self._known[sequence.seq_id], self._block_size
        self._extend(known, sequence, num_computed // size)
        for i, block in enumerate(block_ids[: -(-num_computed // size)]):
            stamp = self._stamps[block]
            if stamp == known.partial_stamp and i == known.num_noted // size:
                return min(known.num_noted, num_computed)
            if i >= len(known.digests) or stamp != known.digests[i]:
                return i * size
        return num_computed

    def note(self, sequence: Sequence, block_ids: Listing[int], start: int, end: int) -> None:
        """The tokens at [start, end) have entries in `block_ids` now, as those before them had."""
        known, size = self._known[sequence.seq_id], self._block_size
        num_full = end // size
        known.num_noted = end
        self._extend(known, sequence, num_full)
        for i in range(start // size, num_full):
            self._stamps[block_ids[i]] = known.digests[i]
        if end % size:
            known.partial_stamp = self._stamps[block_ids[num_full]] = next(self._partial_stamps)

    def _extend(self, known: _Known, sequence: Sequence, num_full: int) -> None:
        """Know the digests of so many full blocks."""
        first = len(known.digests)
        if num_full > first:
            tokens = sequence.tokens_between(first * self._block_size, num_full * self._block_size)
            parent = known.digests[-1] if known.digests else known.root
            known.digests += block_digests(parent, tokens, block_size=self._block_size)
