"""Reads what lies in blocks of the caches of target and drafter, and writes it into blocks of another engine's."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from forerun.drafters.base import BlockKV, Drafter, MovesKV
from forerun.errors import ConfigError
from forerun.kv.cache import KVCache
from forerun.kv.transfer import BlockContents


def read_blocks(
    target: KVCache, drafter: Drafter, blocks: Sequence[int], digests: Sequence[bytes]
) -> tuple[BlockContents, ...]:
    """Copies of what lies in a text's blocks: all of the target's, and of the drafter's own what it has written."""
    found = [BlockContents(tuple(range(len(blocks))), target.read(target.slots_of(blocks)))]
    for own in _kept(drafter):
        places = [i for i, (block, digest) in enumerate(zip(blocks, digests, strict=True)) if own.holds(block, digest)]
        contents = own.cache.read(own.cache.slots_of([blocks[place] for place in places]))
        found.append(BlockContents(tuple(places), contents))
    return tuple(found)


def write_blocks(
    target: KVCache,
    drafter: Drafter,
    blocks: Sequence[int],
    digests: Sequence[bytes],
    caches: Sequence[BlockContents],
    *,
    first: int,
) -> None:
    """Put what `read_blocks` gave into blocks: the text's blocks from place `first` on, with the digests of these.

    Raises:
        ConfigError: the other engine has another model, drafter, dtype or size of blocks.
    """
    kept = _kept(drafter)
    if len(caches) != 1 + len(kept):
        raise ConfigError(
            f"KV transfer: got the KV of {len(caches)} models, this engine has {1 + len(kept)}; give both engines the "
            "same speculative_config"
        )
    for contents, kv in zip(caches, [None, *kept], strict=True):
        cache = target if kv is None else kv.cache
        begin = bisect_left(contents.places, first)  # places ascend, so what is wanted is the end of the tensors
        own = [place - first for place in contents.places[begin:]]
        wanted = [tensor[:, begin * cache.block_size :] for tensor in contents.tensors]
        cache.write(cache.slots_of([blocks[i] for i in own]), wanted)
        if kv is not None:
            for i in own:
                kv.note_block(blocks[i], digests[i])


def _kept(drafter: Drafter) -> Sequence[BlockKV]:
    return drafter.moved_kv if isinstance(drafter, MovesKV) else ()
