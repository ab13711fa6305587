"""Paged attention against the oracle."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.batch import ForwardBatch, LayerKVSpec, SequenceRows
from forerun.kv.cache import KVCache
from forerun.ops.attention import paged
from forerun.ops.attention.naive import NaiveAttention
from forerun.ops.attention.paged import TILE_ROWS, PagedAttention
from tests.ops.native.passes import deal_blocks, filled_cache, levels_batch, make_batch, slots_of

BLOCK_SIZE = 4


def random_tree(rng, num_rows):
    """[num_rows, num_rows] mask and depth of each row: a causal tail, then nodes with random parents."""
    tail = rng.randint(1, num_rows)
    parents = [i - 1 for i in range(tail)] + [rng.randint(tail - 1, i - 1) for i in range(tail, num_rows)]
    mask = torch.zeros(num_rows, num_rows, dtype=torch.bool)
    depths = []
    for row, parent in enumerate(parents):
        if parent >= 0:
            mask[row] = mask[parent]
        mask[row, row] = True
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return mask, depths


def random_batch(rng, lengths, *, scrambled=True, trees=True):
    """A batch of sequences with (num_context, num_rows) of `lengths`, and the number of blocks it needs."""
    needed = [-(-(context + rows) // BLOCK_SIZE) for context, rows in lengths]
    num_blocks = sum(needed) + 2
    free = list(range(num_blocks))
    if scrambled:
        rng.shuffle(free)
    sequences, positions, slots = [], [], []
    for (context, rows), blocks in zip(lengths, needed, strict=True):
        block_ids = np.array([free.pop(0) for _ in range(blocks)], dtype=np.int32)
        tree, depths = random_tree(rng, rows) if trees and rng.random() < 0.5 else (None, range(rows))
        sequences.append(SequenceRows(num_context=context, num_rows=rows, block_ids=block_ids, tree_mask=tree))
        positions += [context + depth for depth in depths]
        slots += [block_ids[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(context, context + rows)]
    batch = ForwardBatch(
        token_ids=torch.zeros(len(slots), dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        sequences=sequences,
        block_size=BLOCK_SIZE,
        logits_rows=torch.arange(len(slots)),
    )
    return batch, num_blocks


def run_both(batch, num_blocks, *, dtype=torch.float64, heads=(4, 2), dims=(8, 8), seed=0, with_sinks=False, **options):
    """Outputs and caches of naive and paged attention over the same random inputs."""
    torch.manual_seed(seed)
    num_heads, num_kv_heads = heads
    spec = LayerKVSpec(num_kv_heads=num_kv_heads, key_dim=dims[0], value_dim=dims[1])
    filled = [torch.randn(num_blocks * BLOCK_SIZE, num_kv_heads, dim, dtype=dtype) for dim in dims]
    num_rows = len(batch.positions)
    query = torch.randn(num_rows, num_heads, dims[0], dtype=dtype)
    key = torch.randn(num_rows, num_kv_heads, dims[0], dtype=dtype)
    value = torch.randn(num_rows, num_kv_heads, dims[1], dtype=dtype)
    if with_sinks:
        options["sinks"] = torch.randn(num_heads, dtype=dtype)
    results = []
    for attention in (NaiveAttention(), PagedAttention()):
        cache = KVCache([spec], num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=dtype, device=torch.device("cpu"))
        cache.layers[0].key.copy_(filled[0])
        cache.layers[0].value.copy_(filled[1])
        attend = attention.begin(batch, cache)
        output = attend(0, query, key, value, scale=dims[0] ** -0.5, **options)
        results.append((output, cache.layers[0]))
    return results


def assert_agree(results, *, atol=1e-9):
    (expected, expected_kv), (output, kv) = results
    torch.testing.assert_close(output, expected, atol=atol, rtol=0)
    assert torch.equal(kv.key, expected_kv.key)
    assert torch.equal(kv.value, expected_kv.value)


LENGTHS = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 12), st.integers(0, 300)),
        st.one_of(st.just(1), st.integers(1, 6), st.integers(1, 40)),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=120, deadline=None)
@given(
    lengths=LENGTHS,
    seed=st.integers(0, 2**20),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    dims=st.sampled_from([(8, 8), (8, 4), (4, 8)]),
    window=st.one_of(st.none(), st.integers(1, 20), st.integers(1, 400)),
    soft_cap=st.one_of(st.none(), st.just(1.5)),
    with_sinks=st.booleans(),
    scrambled=st.booleans(),
)
def test_paged_equals_naive(lengths, seed, heads, dims, window, soft_cap, with_sinks, scrambled):
    batch, num_blocks = random_batch(random.Random(seed), lengths, scrambled=scrambled)
    options = {"window": window, "soft_cap": soft_cap, "with_sinks": with_sinks}
    assert_agree(run_both(batch, num_blocks, heads=heads, dims=dims, seed=seed, **options))


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 2**20))
def test_a_mask_over_earlier_levels_and_hidden_places_equal_naive(lengths, seed):
    batch, num_blocks = levels_batch(random.Random(seed), lengths, block_size=BLOCK_SIZE)
    assert_agree(run_both(batch, num_blocks, seed=seed))


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("context", [0, 70])
def test_long_chunk_equals_naive_across_tiles(context, window):
    lengths = [(3, 1), (context, 2 * TILE_ROWS + 5), (9, 4)]
    batch, num_blocks = random_batch(random.Random(0), lengths, trees=False)
    assert_agree(run_both(batch, num_blocks, window=window))


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_low_precision_stays_near_naive(dtype, atol):
    batch, num_blocks = random_batch(random.Random(1), [(20, 1), (17, 5), (3, 30)])
    assert_agree(run_both(batch, num_blocks, dtype=dtype), atol=atol)


@pytest.mark.parametrize("options", [{}, {"soft_cap": 2.0}, {"window": 6}])
def test_nan_in_foreign_or_stale_slots_reaches_no_output(options):
    rng = random.Random(2)
    batch, num_blocks = random_batch(rng, [(5, 1), (14, 3), (8, 2)])
    own = {
        block * BLOCK_SIZE + offset
        for sequence in batch.sequences
        for i in range(sequence.num_context + sequence.num_rows)
        for block, offset in [(sequence.block_ids[i // BLOCK_SIZE], i % BLOCK_SIZE)]
    }
    spec = LayerKVSpec(num_kv_heads=2, key_dim=8, value_dim=8)
    device = torch.device("cpu")
    cache = KVCache([spec], num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=torch.float32, device=device)
    foreign = [slot for slot in range(num_blocks * BLOCK_SIZE) if slot not in own]
    cache.layers[0].key[foreign] = float("nan")
    cache.layers[0].value[foreign] = float("nan")
    rows = len(batch.positions)
    query, key = torch.randn(rows, 4, 8), torch.randn(rows, 2, 8)
    output = PagedAttention().begin(batch, cache)(0, query, key, key, scale=1.0, **options)
    assert output.isfinite().all()


@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("infinity", [float("nan"), float("-inf")])
def test_a_value_that_is_not_finite_reaches_the_rows_that_see_it_and_no_other(soft_cap, window, infinity):
    batch, num_blocks = random_batch(random.Random(5), [(20, 6), (30, 1), (9, 2)])
    spec = LayerKVSpec(num_kv_heads=2, key_dim=8, value_dim=8)
    torch.manual_seed(0)
    rows = len(batch.positions)
    query, key, value = torch.randn(rows, 4, 8), torch.randn(rows, 2, 8), torch.randn(rows, 2, 8)
    value[2, 1, 5] = infinity
    outputs = []
    for attention in (NaiveAttention(), PagedAttention()):
        cache = KVCache(
            [spec], num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=torch.float32, device=torch.device("cpu")
        )
        cache.layers[0].key.zero_()
        cache.layers[0].value.zero_()
        attend = attention.begin(batch, cache)
        outputs.append(attend(0, query, key, value, scale=1.0, window=window, soft_cap=soft_cap))
    expected, found = outputs
    assert torch.equal(found.isfinite(), expected.isfinite())
    assert not found[2:].isfinite().all()
    assert found[:2].isfinite().all()
    torch.testing.assert_close(found.nan_to_num(0, 0, 0), expected.nan_to_num(0, 0, 0), atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", [{"window": 3}, {"window": 3, "soft_cap": 1.5}], ids=["window", "cap"])
@pytest.mark.parametrize("part", ["key", "value"])
def test_what_is_not_finite_in_the_cache_reaches_no_row_whose_window_is_behind_it(part, options):
    (blocks,), num_blocks = deal_blocks(random.Random(5), [26], block_size=BLOCK_SIZE)
    batch = make_batch([SequenceRows(num_context=20, num_rows=6, block_ids=blocks)], block_size=BLOCK_SIZE)
    spec = LayerKVSpec(num_kv_heads=2, key_dim=8, value_dim=8)
    query, key, value = torch.randn(6, 4, 8), torch.randn(6, 2, 8), torch.randn(6, 2, 8)
    (place,) = slots_of(blocks, [19], block_size=BLOCK_SIZE)
    outputs = []
    for attention in (NaiveAttention(), PagedAttention()):
        cache = filled_cache([spec], num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=torch.float32)
        getattr(cache.layers[0], part)[place] = float("nan")
        outputs.append(attention.begin(batch, cache)(0, query, key, value, scale=1.0, **options))
    expected, found = outputs
    assert found[:2].isnan().all()
    torch.testing.assert_close(found[2:], expected[2:], atol=1e-5, rtol=0)


def test_more_keys_than_one_call_takes_are_split_and_none_lost(monkeypatch):
    monkeypatch.setitem(paged.KEYS_PER_CALL, "cpu", 40)
    batch, num_blocks = random_batch(random.Random(4), [(12, 1), (100, 1), (15, 2), (14, 1), (13, 3)])
    assert_agree(run_both(batch, num_blocks))


def test_layers_with_different_windows_share_one_pass():
    batch, num_blocks = random_batch(random.Random(3), [(20, 2), (30, 1)])
    spec = LayerKVSpec(num_kv_heads=1, key_dim=8, value_dim=8)
    rows = len(batch.positions)
    query, key = torch.randn(rows, 2, 8), torch.randn(rows, 1, 8)
    outputs = []
    for attention in (NaiveAttention(), PagedAttention()):
        device = torch.device("cpu")
        cache = KVCache([spec] * 3, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=torch.float32, device=device)
        attend = attention.begin(batch, cache)
        windows = enumerate((4, None, 9))
        outputs.append(torch.stack([attend(i, query, key, key, scale=1.0, window=window) for i, window in windows]))
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-5, rtol=0)
