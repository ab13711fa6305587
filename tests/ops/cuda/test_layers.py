"""Norms, rotations, KV writes and embeddings on the kernels agree with their formulas, and these with `ops.layers`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.ops.cuda import layers
from forerun.ops.layers import RMSNorm
from forerun.ops.rotary import RopeConfig, Rotary
from tests.cuda import DEVICE, ints, random

from forerun.ops.cuda.kernels import layers as kernels  # isort: skip - tests.cuda comes first

few = settings(max_examples=8, deadline=None)
SIZES = st.tuples(st.integers(1, 4), st.integers(1, 40))
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
EPS = 1e-5


def assert_close(found, expected):
    tolerance = 1e-5 if expected.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@few
@given(SIZES, DTYPES, st.integers(0, 99))
def test_norms_agree(size, dtype, seed):
    x, weight = random(*size, seed=seed), random(size[1], seed=seed + 1, dtype=dtype)
    expected, found = torch.empty(size, dtype=dtype, device=DEVICE), torch.empty(size, dtype=dtype, device=DEVICE)
    layers.rms_norm(x, weight, expected, eps=EPS)
    kernels.rms_norm(x, weight, found, eps=EPS)
    assert_close(found, expected)
    assert_close(found, RMSNorm(weight.float(), EPS)(x).to(dtype))


@few
@given(SIZES, DTYPES, st.booleans())
def test_norms_of_a_part_of_each_row_agree_and_leave_the_rest(size, dtype, has_weight):
    num_rows, width = size
    x, weight = random(num_rows, 2 * width + 1, dtype=dtype), random(width, seed=1)
    both = []
    for module in (layers, kernels):
        rows = x.clone()
        part = rows[:, width : 2 * width]
        module.rms_norm(part, weight if has_weight else None, part, eps=EPS)
        both.append(rows)
    assert_close(both[1], both[0])
    assert torch.equal(both[1][:, :width], x[:, :width])
    assert torch.equal(both[1][:, -1], x[:, -1])
    assert torch.equal(both[1], x) == (not has_weight)


@few
@given(SIZES, DTYPES, st.sampled_from([1.0, 0.25]))
def test_normed_updates_are_added_to_the_stream(size, dtype, scale):
    residual, update, weight = random(*size), random(*size, seed=1, dtype=dtype), random(size[1], seed=2)
    both = []
    for module in (layers, kernels):
        stream = residual.clone()
        module.add_normed(update, weight, stream, eps=EPS, scale=scale)
        both.append(stream)
    assert_close(both[1], both[0])
    assert_close(both[0], residual + scale * RMSNorm(weight, EPS)(update.float()))


@few
@given(SIZES, DTYPES)
def test_hidden_states_are_kept_at_their_slots_and_those_of_padding_nowhere(size, dtype):
    num_rows, width = size
    source, kv_slots = random(*size), torch.arange(num_rows, device=DEVICE) * 2
    kv_slots[-1] = -1
    both = []
    for module in (layers, kernels):
        kept = torch.full((8, width), -7.0, dtype=dtype, device=DEVICE)
        module.keep(source, kv_slots, kept)
        both.append(kept)
    assert_close(both[1], both[0])  # the interpreter cuts where a GPU rounds
    assert torch.equal(both[0][kv_slots[:-1]], source[:-1].to(dtype))
    assert (both[0] == -7.0).all(1).sum() == 8 - (num_rows - 1)


@few
@given(
    st.integers(1, 4),
    st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    st.sampled_from([(8, 8), (12, 8), (16, 4), (8, 0)]),
    DTYPES,
    st.sampled_from([None, "shared", "each"]),
)
def test_rotations_and_writes_agree(num_rows, heads, dims, dtype, norms):
    (num_heads, num_kv_heads), (dim, rotated) = heads, dims
    kv_slots = torch.arange(num_rows, device=DEVICE) * 3
    kv_slots[-1] = -1  # padding
    rotation = None
    if rotated:
        rotary = Rotary(RopeConfig(dim=rotated, theta=100.0), dtype=torch.float32, device=DEVICE)
        rotation = rotary.rotation(torch.arange(3, 3 + num_rows, device=DEVICE))
    qkv = random(num_rows, num_heads + 2 * num_kv_heads, dim, dtype=dtype)
    options = {"eps": EPS}
    if norms is not None:
        options["query_norm"] = random(*((num_heads, dim) if norms == "each" else (dim,)), seed=5)
        options["key_norm"] = random(*((num_kv_heads, dim) if norms == "each" else (dim,)), seed=6)
    both = []
    for module in (layers, kernels):
        query = torch.empty(num_rows, num_heads, dim, dtype=dtype, device=DEVICE)
        keys, values = (torch.zeros(12, num_kv_heads, dim, dtype=dtype, device=DEVICE) for _ in range(2))
        module.rotate_and_write(qkv, query, keys, values, kv_slots, rotation, **options)
        both.append((query, keys, values))
    for found, expected in zip(both[1], both[0], strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_are_the_rows_of_the_table(dtype):
    table, token_ids = random(5, 33, dtype=dtype), ints(4, 0, 2)
    for module in (layers, kernels):
        residual = torch.empty(3, 33, device=DEVICE)
        module.embed(token_ids, table, residual, scale=0.5)
        assert torch.equal(residual, table[[4, 0, 2]].float() * 0.5)
