"""The KV of one sequence: which blocks it holds and how many of its tokens are in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from forerun.kv.block_pool import AccountingError, BlockPool
from forerun.kv.events import BlockStored
from forerun.kv.prefix_cache import block_digests, root_digest

FIRST_TABLE_SIZE = 16  # blocks; a table doubles whenever it is full


class BlockTable:
    """The blocks of one sequence: it grows by reserved places and is charged for committed tokens only.

    `block_ids` (int32) cover the places [0, num_computed + capacity). KV of committed tokens lies at
    [0, num_computed); the places after it are reserved, and whatever a step writes there counts
    for nothing until `commit`. Nothing depends on where a prompt ends, so any mix of prompt and
    output tokens may be committed in any chunks.

    Invariants:
        - the first num_computed // block_size blocks are immutable, all others mutable;
        - a mutable block has this table as its only holder and is not in the prefix cache;
        - equal tokens under equal salts lie in the same immutable block, others never (with
          prefix caching on);
        - an operation that raises, or answers False, leaves table and pool unchanged.
    """

    def __init__(self, pool: BlockPool, *, block_size: int, cache_salt: str | None = None) -> None:
        self.num_blocks = 0
        self.num_computed = 0
        self._table = np.empty(FIRST_TABLE_SIZE, dtype=np.int32)  # grows; the first `num_blocks` count
        self._pool = pool
        self._block_size = block_size
        self._cache_salt = cache_salt
        self._root = root_digest(cache_salt)
        self._digests: list[bytes] = []  # of the immutable blocks
        self._partial: list[int] = []  # committed tokens of the block that is not full yet

    @property
    def block_ids(self) -> npt.NDArray[np.int32]:
        """The blocks in the order of their places: a view, good until the table changes."""
        return self._table[: self.num_blocks]

    @property
    def capacity(self) -> int:
        """Places beyond `num_computed` that are reserved."""
        return self.num_blocks * self._block_size - self.num_computed

    @property
    def num_exclusive_blocks(self) -> int:
        """Blocks that nobody else holds: what `free` would make available."""
        return sum(self._pool.num_references(block) == 1 for block in self.block_ids.tolist())

    def prefix_digests(self, token_ids: Sequence[int]) -> list[bytes]:
        """What `match` looks up: digests of the full blocks of `token_ids`, the last token left out.

        The last token is computed in any case, because its logits are wanted.
        """
        return list(block_digests(self._root, token_ids[:-1], block_size=self._block_size))

    def match(self, digests: Iterable[bytes]) -> int:
        """Claim the cached blocks that hold a prefix (see `prefix_digests`); returns the new `num_computed`.

        Raises:
            AccountingError: the table is not empty.
        """
        if self.num_blocks:
            raise AccountingError(f"match: the table holds {self.num_blocks} blocks; must be empty; free it first")
        found: list[int] = []
        for digest in digests:
            block = self._pool.find(digest)
            if block is None:
                break
            found.append(block)
            self._digests.append(digest)
        for block in found:
            self._pool.share(block)
        self._append_blocks(found)
        self.num_computed = self.num_blocks * self._block_size
        return self.num_computed

    def allocate(self, num_tokens: int) -> bool:
        """Make room for `num_tokens` beyond `num_computed`; False, and nothing changed, if the pool has none.

        Raises:
            AccountingError: `num_tokens` is negative.
        """
        if num_tokens < 0:
            raise AccountingError(f"allocate: got {num_tokens} tokens; must be 0 or more")
        num_tokens += self.num_computed
        if num_tokens <= self.num_blocks * self._block_size:  # as in most steps of decoding
            return True
        num_missing = self._num_blocks_for(num_tokens) - self.num_blocks
        blocks = self._pool.take(num_missing)
        if blocks is None:
            return False
        self._append_blocks(blocks)
        return True

    def commit(self, token_ids: Sequence[int]) -> None:
        """Declare that the KV of `token_ids` is in the places from `num_computed` on.

        Blocks that are full now become immutable and findable. Where the same content is cached
        already the table is pointed to it, so slots and block ids from before this call may be stale.

        Raises:
            AccountingError: fewer places are reserved than there are tokens.
        """
        if len(token_ids) > self.capacity:
            raise AccountingError(
                f"commit: got {len(token_ids)} tokens for {self.capacity} places; allocate them first"
            )
        if len(self._partial) + len(token_ids) < self._block_size:
            self._partial += token_ids
        else:
            self._register_full_blocks([*self._partial, *token_ids])
        self.num_computed += len(token_ids)

    def release_surplus(self, keep: int = 0) -> None:
        """Give back the reserved blocks beyond those for `keep` more tokens.

        Raises:
            AccountingError: `keep` is negative: committed KV is given up by `free` alone.
        """
        if keep < 0:
            raise AccountingError(f"release_surplus: got keep={keep}; must be 0 or more")
        self._keep_blocks(self._num_blocks_for(self.num_computed + keep))

    def free(self) -> None:
        """Give back everything; the table is empty again, ready for `match`."""
        self._keep_blocks(0)
        self._digests.clear()
        self._partial.clear()
        self.num_computed = 0

    def slots(self, start: int, count: int) -> list[int]:
        """Cache places (block id * block size + offset) of token places [start, start + count).

        Raises:
            AccountingError: some of these places are not reserved.
        """
        size, end = self._block_size, start + count
        if not 0 <= start <= end <= self.num_blocks * size:
            raise AccountingError(f"slots: got places {start} to {end}; must be within 0 to {self.num_blocks * size}")
        places: list[int] = []
        for index in range(start // size, self._num_blocks_for(end)):
            first = int(self._table[index]) * size
            places += range(first + max(start - index * size, 0), first + min(end - index * size, size))
        return places

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _append_blocks(self, blocks: Sequence[int]) -> None:
        end = self.num_blocks + len(blocks)
        if end > len(self._table):
            table = np.empty(max(end, 2 * len(self._table)), dtype=np.int32)
            table[: self.num_blocks] = self.block_ids
            self._table = table
        self._table[self.num_blocks : end] = blocks
        self.num_blocks = end

    def _register_full_blocks(self, pending: list[int]) -> None:
        """Make the blocks that `pending` fills immutable, and point the table to where their content lies."""
        parent = self._digests[-1] if self._digests else self._root
        for number, digest in enumerate(list(block_digests(parent, pending, block_size=self._block_size))):
            index = len(self._digests)
            block = int(self._table[index])
            canonical = self._pool.register(block, digest)
            if canonical == block:
                start = number * self._block_size
                self._note_stored(digest, pending[start : start + self._block_size])
            self._table[index] = canonical
            self._digests.append(digest)
        self._partial = pending[len(pending) - len(pending) % self._block_size :]

    def _note_stored(self, digest: bytes, token_ids: Sequence[int]) -> None:
        """Tell whoever asks that a block can be found now; without prefix caching none can."""
        if self._pool.events is not None and self._pool.enable_prefix_caching:
            parent = self._digests[-1] if self._digests else None
            self._pool.events.add(BlockStored(digest, parent, tuple(token_ids), self._cache_salt))

    def _keep_blocks(self, num_blocks: int) -> None:
        if num_blocks < self.num_blocks:
            surplus = self.block_ids[num_blocks:].tolist()
            self.num_blocks = num_blocks
            self._pool.give_back(surplus[::-1])  # tail first: heads, which more sequences share, are evicted last
