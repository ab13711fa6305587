"""KV tensors: moving an accepted tree path into contiguous slots, and the bytes a block takes."""

import sys
from pathlib import Path

import pytest
import torch

from forerun.core.batch import LayerKVSpec
from forerun.kv.block_pool import BlockPool
from forerun.kv.block_table import BlockTable
from forerun.kv.cache import KVCache, bytes_per_block
from forerun.ops.native.memory import give_back_freed_memory

SPECS = [LayerKVSpec(num_kv_heads=2, key_dim=4, value_dim=3), LayerKVSpec(num_kv_heads=1, key_dim=2, value_dim=2)]
NUM_SLOTS = 12


def make_cache(dtype=torch.float32):
    return KVCache(SPECS, num_blocks=3, block_size=4, dtype=dtype, device=torch.device("cpu"))


def numbered_cache():
    """A cache in which every entry at slot s holds the number s."""
    cache = make_cache()
    numbers = torch.arange(NUM_SLOTS, dtype=torch.float32)[:, None, None]
    for layer in cache.layers:
        layer.key.copy_(numbers.expand_as(layer.key))
        layer.value.copy_(-numbers.expand_as(layer.value))
    return cache


def contents(cache):
    """The slot number that each slot's entries hold now; every head, dimension and layer must agree."""
    numbers = cache.layers[0].key[:, 0, 0]
    for layer in cache.layers:
        assert torch.equal(layer.key, numbers[:, None, None].expand_as(layer.key))
        assert torch.equal(layer.value, -numbers[:, None, None].expand_as(layer.value))
    return numbers.long().tolist()


def test_layers_have_the_shapes_of_their_specs():
    shapes = [(tuple(layer.key.shape), tuple(layer.value.shape)) for layer in make_cache().layers]
    assert shapes == [((12, 2, 4), (12, 2, 3)), ((12, 1, 2), (12, 1, 2))]


def test_move_copies_keys_and_values_in_every_layer_and_nothing_else():
    cache = numbered_cache()
    cache.move(torch.tensor([5, 9]), torch.tensor([2, 3]))
    assert contents(cache) == [0, 1, 5, 9, 4, 5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("sources", "destinations", "expected"),
    [
        ([2, 3, 4], [1, 2, 3], [0, 2, 3, 4, 4]),  # down by one
        ([1, 2, 3], [2, 3, 4], [0, 1, 1, 2, 3]),  # up by one
        ([1, 2], [2, 1], [0, 2, 1, 3, 4]),  # swap
    ],
)
def test_move_reads_all_sources_before_it_writes(sources, destinations, expected):
    cache = numbered_cache()
    cache.move(torch.tensor(sources), torch.tensor(destinations))
    assert contents(cache)[:5] == expected


def test_moving_nothing_changes_nothing():
    cache = numbered_cache()
    nothing = torch.tensor([], dtype=torch.int64)
    cache.move(nothing, nothing)
    assert contents(cache) == list(range(NUM_SLOTS))


def test_accepted_tree_path_ends_up_in_the_places_that_are_committed():
    cache = numbered_cache()
    slot = BlockTable(BlockPool(3), block_size=4)
    slot.allocate(8)
    slot.commit([10, 11])
    path = [1, 3, 4]  # accepted nodes of a tree whose rows were written from place 2 on
    rows = torch.tensor(slot.slots(2, 6))
    cache.move(rows[path], rows[: len(path)])
    slot.commit([12, 13, 14])
    held = contents(cache)
    assert [held[place] for place in slot.slots(2, 3)] == rows[path].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_per_block_is_what_the_tensors_take(dtype):
    layers = make_cache(dtype).layers
    taken = sum(layer.key.nbytes + layer.value.nbytes for layer in layers)
    assert 3 * bytes_per_block(SPECS, block_size=4, dtype=dtype) == taken


def resident():
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_unused_cache_is_zero_and_takes_no_memory_whatever_was_freed_before():
    first = torch.ones(31 << 20, dtype=torch.uint8)
    del first  # from now on glibc takes smaller ones from its heap
    large = [torch.ones(2 << 20, dtype=torch.uint8) for _ in range(60)]
    small = torch.ones(10_000)  # keeps the heap from shrinking
    del large
    give_back_freed_memory()
    before = resident()
    spec = LayerKVSpec(num_kv_heads=1, key_dim=64, value_dim=64)
    device = torch.device("cpu")
    cache = KVCache([spec] * 50, num_blocks=1 << 10, block_size=16, dtype=torch.uint8, device=device)
    assert resident() < before + cache.num_bytes / 10
    assert not cache.layers[-1].value.any()
    assert small.all()
