"""Who holds each block of KV memory: reference counts and the order in which free blocks are reused."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from forerun.kv.events import BlockEventLog, BlockRemoved
from forerun.kv.prefix_cache import PrefixCache


class AccountingError(Exception):
    """A caller broke the contract of KV accounting: a defect of forerun, not a user's mistake."""


class BlockPool:
    """A fixed number of blocks, each free or referenced, some of them findable by their content.

    A referenced block that is not in the prefix cache has one holder, who may write it. A block in
    the prefix cache is never written and may have many holders. A freed block stays in the cache
    until its memory is needed: free blocks without content go first, then cached ones, the least
    recently freed first. Every operation is O(1) per block; an error leaves the pool unchanged.
    `events`, where somebody has set it, gets what changes in the prefix cache.
    """

    def __init__(self, num_blocks: int, *, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self.events: BlockEventLog | None = None  # None: nobody asks
        self._num_references = [0] * num_blocks
        self._free_uncached = list(range(num_blocks - 1, -1, -1))  # a stack
        self._free_cached: OrderedDict[int, None] = OrderedDict()  # least recently freed first
        self._cache = PrefixCache()

    @property
    def num_free(self) -> int:
        """Blocks that nobody references, cached or not."""
        return len(self._free_uncached) + len(self._free_cached)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by their content, referenced or free."""
        return len(self._cache)

    def num_references(self, block: int) -> int:
        """How many holders `block` has."""
        return self._num_references[block]

    def take(self, num_blocks: int) -> list[int] | None:
        """Hand out `num_blocks` blocks to write, or None, and nothing changed, if fewer are free."""
        if num_blocks < 0:
            raise AccountingError(f"take: got {num_blocks} blocks; must be 0 or more")
        if num_blocks > self.num_free:
            return None
        blocks = [self._free_uncached.pop() if self._free_uncached else self._evict() for _ in range(num_blocks)]
        for block in blocks:
            self._num_references[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """Add a holder to a cached block.

        Raises:
            AccountingError: the block is not cached, so that its holder may still write it.
        """
        if block not in self._cache:
            raise AccountingError(f"share: block {block} is not in the prefix cache; only immutable blocks are shared")
        if not self._num_references[block]:
            del self._free_cached[block]
        self._num_references[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each of `blocks`, in order: of cached ones the first is evicted first.

        Raises:
            AccountingError: a block occurs twice or has no holder.
        """
        references = self._num_references
        if len(set(blocks)) < len(blocks) or any(not references[block] for block in blocks):
            raise AccountingError(f"give_back: got blocks {list(blocks)}; each must be referenced and occur once")
        for block in blocks:
            references[block] -= 1
            if references[block]:
                continue
            if block in self._cache:
                self._free_cached[block] = None
            else:
                self._free_uncached.append(block)

    def register(self, block: int, digest: bytes) -> int:
        """Make a filled block findable and immutable; returns the one block that holds this content.

        Where another block holds it already, the caller becomes a holder of that one and its own
        duplicate is given back. Without prefix caching the answer is always `block`.

        Raises:
            AccountingError: the block is cached already or does not have exactly one holder.
        """
        if self._num_references[block] != 1 or block in self._cache:
            raise AccountingError(f"register: block {block} must have one holder and not be in the prefix cache yet")
        if not self.enable_prefix_caching:
            return block
        canonical = self._cache.find(digest)
        if canonical is None:
            self._cache.add(block, digest)
            return block
        self.share(canonical)
        self.give_back([block])
        return canonical

    def find(self, digest: bytes) -> int | None:
        """The block that holds this content, None where there is none; `share` it to keep it."""
        return self._cache.find(digest)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content (the weights changed, say); False, and nothing done, if a block is in use."""
        if self.num_free < self.num_blocks:
            return False
        for digest in self._cache.clear():
            self._note_removed(digest)
        self._free_uncached.extend(self._free_cached)
        self._free_cached.clear()
        return True

    def check_integrity(self, block_tables: Iterable[Sequence[int]] | None = None) -> None:
        """Check the pool's invariants, for tests and idle time; takes time linear in the pool.

        Args:
            block_tables: the block ids of every holder; every reference must be accounted for by
                one of them. None leaves the holders unchecked.

        Raises:
            AccountingError: an invariant is broken; the message says which.
        """
        self._check_free_lists()
        if block_tables is not None:
            self._check_holders(block_tables)

    def _evict(self) -> int:
        block, _ = self._free_cached.popitem(last=False)
        self._note_removed(self._cache.remove(block))
        return block

    def _note_removed(self, digest: bytes) -> None:
        if self.events is not None:
            self.events.add(BlockRemoved(digest))

    def _check_free_lists(self) -> None:
        free = [*self._free_uncached, *self._free_cached]
        unreferenced = [block for block, count in enumerate(self._num_references) if count == 0]
        if sorted(free) != unreferenced:
            raise AccountingError(f"free blocks {sorted(free)} are not the unreferenced ones {unreferenced}")
        for block in self._free_uncached:
            if block in self._cache:
                raise AccountingError(f"block {block} is cached but listed as free without content")
        for block in self._free_cached:
            if block not in self._cache:
                raise AccountingError(f"block {block} is listed as free with content but not cached")
        if not self._cache.is_one_to_one():
            raise AccountingError("the prefix cache maps a digest and a block to different partners")

    def _check_holders(self, block_tables: Iterable[Sequence[int]]) -> None:
        holders = Counter(block for table in block_tables for block in table)
        for block, count in enumerate(self._num_references):
            if holders[block] != count:
                raise AccountingError(f"block {block} counts {count} references but has {holders[block]} holders")
            if count > 1 and block not in self._cache:
                raise AccountingError(f"block {block} has {count} holders but is still mutable")
