"""Packed passes over random sequences, trees among them, in blocks that lie in no order."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import torch

from forerun.core.batch import ForwardBatch, LayerKVSpec, SequenceRows
from forerun.kv.cache import KVCache

CPU = torch.device("cpu")


def tree_mask(parents):
    """[nodes, nodes]: node i continues node parents[i], -1 the context; each sees itself and its ancestors."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def random_parents(rng, num_rows):
    """A committed token, then nodes with random parents."""
    return [-1] + [rng.randrange(row) for row in range(1, num_rows)]


def deal_blocks(rng, lengths, *, block_size):
    """Block ids for sequences of `lengths` tokens, shuffled, and how many blocks there are."""
    needed = [-(-length // block_size) for length in lengths]
    free = list(range(sum(needed) + 2))
    rng.shuffle(free)
    return [np.array([free.pop() for _ in range(count)], dtype=np.int32) for count in needed], sum(needed) + 2


def slots_of(blocks, places, *, block_size):
    """Slots of a sequence's places."""
    return [int(blocks[i // block_size]) * block_size + i % block_size for i in places]


def make_batch(sequences, *, block_size, token_ids=None):
    """A pass over `SequenceRows`, logits at every row."""
    positions, slots = [], []
    for rows in sequences:
        places = range(rows.num_context, rows.num_context + rows.num_rows)
        depths = range(rows.num_rows) if rows.tree_mask is None else (rows.tree_mask.sum(1) - 1).tolist()
        positions += [rows.num_context + depth for depth in depths]
        slots += slots_of(rows.block_ids, places, block_size=block_size)
    return ForwardBatch(
        token_ids=torch.zeros(len(slots), dtype=torch.int64) if token_ids is None else token_ids,
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        sequences=sequences,
        block_size=block_size,
        logits_rows=torch.arange(len(slots)),
    )


def random_batch(rng, lengths, *, block_size):
    """A pass of sequences with (num_context, num_rows) of `lengths`, half of them trees; and the number of blocks."""
    blocks, num_blocks = deal_blocks(rng, [sum(length) for length in lengths], block_size=block_size)
    sequences = [
        SequenceRows(
            num_context=context,
            num_rows=rows,
            block_ids=block_ids,
            tree_mask=tree_mask(random_parents(rng, rows)) if rng.random() < 0.5 else None,
        )
        for (context, rows), block_ids in zip(lengths, blocks, strict=True)
    ]
    return make_batch(sequences, block_size=block_size), num_blocks


def levels_batch(rng, lengths, *, block_size):
    """Like `random_batch`, of rows that see chosen ones among the last places of the context too, and not the first."""
    blocks, num_blocks = deal_blocks(rng, [sum(length) for length in lengths], block_size=block_size)
    sequences = []
    for (context, rows), block_ids in zip(lengths, blocks, strict=True):
        num_hidden = rng.randint(0, min(2, context))
        num_before = rng.randint(0, context - num_hidden)
        mask = torch.eye(rows, num_before + rows, dtype=torch.bool).roll(num_before, dims=1)
        mask |= torch.tensor([[rng.random() < 0.4 for _ in range(mask.shape[1])] for _ in range(rows)])
        rows_of = SequenceRows(num_context=context, num_rows=rows, block_ids=block_ids, num_hidden=num_hidden)
        sequences.append(replace(rows_of, tree_mask=mask) if rng.random() < 0.7 else rows_of)
    return make_batch(sequences, block_size=block_size), num_blocks


def filled_cache(specs, *, num_blocks, block_size, dtype, seed=0):
    """A cache of random keys and values."""
    cache = KVCache(specs, num_blocks=num_blocks, block_size=block_size, dtype=dtype, device=CPU)
    source = torch.Generator().manual_seed(seed)
    for layer in cache.layers:
        for tensor in (layer.key, layer.value):
            tensor.copy_(torch.randn(tensor.shape, generator=source))
    return cache


def cache_copy(cache, *, dtype):
    """The same keys and values in another dtype."""
    specs = [
        LayerKVSpec(num_kv_heads=kv.key.shape[1], key_dim=kv.key.shape[2], value_dim=kv.value.shape[2])
        for kv in cache.layers
    ]
    num_blocks = len(cache.layers[0].key) // cache.block_size
    copy = KVCache(specs, num_blocks=num_blocks, block_size=cache.block_size, dtype=dtype, device=CPU)
    for mine, theirs in zip(copy.layers, cache.layers, strict=True):
        mine.key.copy_(theirs.key)
        mine.value.copy_(theirs.value)
    return copy


def source(seed):
    """Random choices of a test's own."""
    return random.Random(seed)
