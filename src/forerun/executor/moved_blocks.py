"""Reads what lies in blocks of the caches of target and drafter, and writes it into blocks of another engine's."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from forerun.drafters.base import BlockKV, Drafter, MovesKV
from forerun.errors import ConfigError
from forerun.kv.cache import KVCache
from forerun.kv.transfer import BlockContents


def read_blocks(
    target: KVCache, drafter: Drafter, blocks: Sequence[int], digests: Sequence[bytes]
) -> tuple[BlockContents, ...]:
    """Copies of what lies in a text's blocks: all of the target's, and of the drafter's own what it has written."""
    found = [BlockContents(tuple(range(len(blocks))), target.read(slots_of(target, blocks)))]
    for own in _kept(drafter):
        places = [i for i, (block, digest) in enumerate(zip(blocks, digests, strict=True)) if own.holds(block, digest)]
        contents = own.cache.read(slots_of(own.cache, [blocks[place] for place in places]))
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
    for number, contents in enumerate(caches):
        cache = target if number == 0 else kept[number - 1].cache
        begin = bisect_left(contents.places, first)  # places ascend, so what is wanted is the end of the tensors
        own = [place - first for place in contents.places[begin:]]
        wanted = [tensor[:, begin * cache.block_size :] for tensor in contents.tensors]
        cache.write(slots_of(cache, [blocks[i] for i in own]), wanted)
        if number:
            for i in own:
                kept[number - 1].note_block(blocks[i], digests[i])


def slots_of(cache: KVCache, blocks: Sequence[int]) -> Tensor:
    """The slots of blocks, one block after the other: [n * block_size] int64."""
    first = np.asarray(blocks, dtype=np.int64) * cache.block_size
    return torch.from_numpy((first[:, None] + np.arange(cache.block_size)).reshape(-1))


def _kept(drafter: Drafter) -> Sequence[BlockKV]:
    return drafter.moved_kv if isinstance(drafter, MovesKV) else ()
