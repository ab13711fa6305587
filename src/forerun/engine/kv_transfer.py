"""Gives another engine the KV of a text's beginning, and takes it from one: through the prefix cache on both sides.

What arrives is found there as if this engine had computed it. So a text cannot depend on a transfer: what is missing,
or was evicted again, is computed, to the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from forerun.errors import ConfigError
from forerun.kv.block_table import BlockTable
from forerun.kv.prefix_cache import block_digests, root_digest
from forerun.kv.transfer import TransferredKV

if TYPE_CHECKING:
    from forerun.engine.engine import EngineParts


def num_missing_tokens(parts: EngineParts, token_ids: Sequence[int], cache_salt: str | None) -> int:
    """The tokens of a prompt's full blocks that the prefix cache does not have: what a transfer can bring."""
    with _table_for_now(parts, cache_salt) as table:
        digests = table.prefix_digests(token_ids)
        return len(digests) * parts.block_size - table.match(digests)


def export_kv(parts: EngineParts, token_ids: Sequence[int], cache_salt: str | None = None) -> TransferredKV:
    """Copy the KV of the leading full blocks of a prompt that are in the prefix cache; between two steps."""
    with _table_for_now(parts, cache_salt) as table:
        digests = table.prefix_digests(token_ids)
        num_tokens = table.match(digests)
        blocks = table.block_ids.tolist()
        caches = parts.executor.read_blocks(blocks, digests[: len(blocks)])
    return TransferredKV(
        token_ids=tuple(token_ids[:num_tokens]), cache_salt=cache_salt, block_size=parts.block_size, caches=caches
    )


def import_kv(parts: EngineParts, kv: TransferredKV, *, spare_blocks: int = 0) -> bool:
    """Put the KV of a text's beginning into the prefix cache, between two steps; blocks that are there already stay.

    Args:
        parts: the engine's.
        kv: of an engine with the same model, drafter, dtype and size of blocks.
        spare_blocks: free blocks that must remain beside it.

    Returns:
        False, and nothing is changed, where there is no memory for it now, or no prefix cache.

    Raises:
        ConfigError: the engines differ.
    """
    if kv.block_size != parts.block_size:
        raise ConfigError(
            f"block_size: got KV in blocks of {kv.block_size} tokens, those of this engine have {parts.block_size}; give "
            "both engines the same"
        )
    if not parts.pool.enable_prefix_caching:
        return False
    digests = list(block_digests(root_digest(kv.cache_salt), kv.token_ids, block_size=parts.block_size))
    with _table_for_now(parts, kv.cache_salt) as table:
        num_known = table.match(digests)
        first = table.num_blocks
        num_missing = len(digests) - first
        if num_missing == 0:
            return True
        if num_missing + spare_blocks > parts.pool.num_free or not table.allocate(len(kv.token_ids) - num_known):
            return False
        parts.executor.write_blocks(table.block_ids[first:].tolist(), digests[first:], kv.caches, first=first)
        table.commit(kv.token_ids[num_known:])
        return True


@contextmanager
def _table_for_now(parts: EngineParts, cache_salt: str | None) -> Iterator[BlockTable]:
    """An empty table; what it holds at the end of the block is given back."""
    table = BlockTable(parts.pool, block_size=parts.block_size, cache_salt=cache_salt)
    try:
        yield table
    finally:
        table.free()
