"""Attention for rows that the host lays out agrees with the oracle: whatever a mask lets a row see, and wherever that lies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.batch import LayerKVSpec
from forerun.kv.cache import KVCache
from forerun.ops.attention.naive import NaiveAttention
from forerun.ops.cuda import attention, layers, matmul
from forerun.ops.cuda.functions import LayerFunctions
from forerun.ops.cuda.passes import DeviceAttention, DevicePass, lay_out_rows
from forerun.ops.cuda.table import StepRows
from tests.cuda import DEVICE, random
from tests.ops.native.passes import levels_batch, source

from forerun.ops.cuda.kernels import attention as attention_kernels  # isort: skip - tests.cuda comes first
from forerun.ops.cuda.kernels import layers as layer_kernels  # isort: skip
from forerun.ops.cuda.kernels import matmul as matmul_kernels  # isort: skip

BLOCK_SIZE, DIM = 4, 8
FORMULAS = LayerFunctions.of(attention=attention, layers=layers, matmul=matmul, are_kernels=False)
KERNELS = LayerFunctions.of(attention=attention_kernels, layers=layer_kernels, matmul=matmul_kernels, are_kernels=True)
LENGTHS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 5)), min_size=1, max_size=3)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(attention_kernels, "LEAST_CHUNK", attention_kernels.BLOCK_KEYS)
    if DEVICE.type == "cpu":  # less than tensor cores take
        monkeypatch.setattr(attention_kernels, "LEAST_CHUNK", 16)
        monkeypatch.setattr(attention_kernels, "BLOCK_KEYS", 8)
        monkeypatch.setattr(attention_kernels, "TILE", 4)


def moved(batch):
    names = ("token_ids", "positions", "slot_mapping", "logits_rows")
    return replace(batch, **{name: getattr(batch, name).to(DEVICE) for name in names})


def random_pass(rng, lengths, *, num_hidden):
    """A pass of rows that see chosen places; all sequences have as many hidden places."""
    batch, num_blocks = levels_batch(rng, lengths, block_size=BLOCK_SIZE)
    hidden = num_hidden if all(rows.num_hidden >= num_hidden for rows in batch.sequences) else 0
    sequences = [replace(rows, num_hidden=hidden) for rows in batch.sequences]
    return moved(replace(batch, sequences=sequences)), num_blocks


@pytest.mark.parametrize("functions", [FORMULAS, KERNELS], ids=["formulas", "kernels"])
@settings(max_examples=12, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 999), num_hidden=st.integers(0, 1), with_sinks=st.booleans())
def test_rows_see_what_their_masks_say(functions, lengths, seed, num_hidden, with_sinks):
    batch, num_blocks = random_pass(source(seed), lengths, num_hidden=num_hidden)
    num_rows = len(batch.positions)
    query, key, value = random(num_rows, 4, DIM), random(num_rows, 2, DIM, seed=1), random(num_rows, 2, DIM, seed=2)
    spec = LayerKVSpec(num_kv_heads=2, key_dim=DIM, value_dim=DIM)
    options = {"scale": 0.3, "sinks": random(4) if with_sinks else None}
    results = []
    for attention_of in (NaiveAttention(), DeviceAttention(functions)):
        cache = KVCache([spec], num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=torch.float32, device=DEVICE)
        cache.layers[0].key.copy_(random(num_blocks * BLOCK_SIZE, 2, DIM, seed=3))
        output = attention_of.begin(batch, cache)(0, query, key, value, **options)
        results.append((output, cache.layers[0].key, cache.layers[0].value))
    (expected, *expected_kv), (found, *found_kv) = results
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert all(map(torch.equal, found_kv, expected_kv))


def test_sequences_with_other_hidden_places_are_refused():
    batch, num_blocks = random_pass(source(1), [(3, 1), (3, 1)], num_hidden=0)
    batch.sequences[0] = replace(batch.sequences[0], num_hidden=1)
    cache = KVCache([], num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=torch.float32, device=DEVICE)
    with pytest.raises(ValueError, match="num_hidden"):
        DeviceAttention(FORMULAS).begin(batch, cache)


def test_features_that_the_cache_has_room_for_are_kept_there_and_the_others_returned():
    rows = StepRows.empty(3, 1, longest_path=1, device=DEVICE)
    rows.kv_slots[:2] = torch.tensor([5, 2], device=DEVICE)
    cache = KVCache(
        [], num_blocks=2, block_size=BLOCK_SIZE, dtype=torch.float32, device=DEVICE, feature_widths={"hidden.1": 6}
    )
    step = DevicePass(FORMULAS, cache, rows, rows.path_slots, num_hidden=0)
    states = random(3, 6)
    left = step.keep({"hidden.1": states, "last_hidden": states})
    assert left.keys() == {"last_hidden"}
    assert torch.equal(cache.features["hidden.1"][[5, 2]], states[:2])
    assert cache.features["hidden.1"].abs().sum(1).count_nonzero() == 2


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5])
def test_what_is_laid_out_begins_at_sixteen_bytes_however_many_rows_there_are(num_rows):
    batch, _ = random_pass(source(num_rows), [(4, num_rows)], num_hidden=0)
    laid_out = lay_out_rows(batch)
    rows = laid_out.rows
    tensors = (rows.slots, rows.positions, rows.num_linear, rows.path_slots, laid_out.block_table)
    assert [len(one) for one in tensors] == [len(batch.positions)] * 4 + [1]
    assert {one.storage_offset() * one.itemsize % 16 for one in tensors} == {0}
