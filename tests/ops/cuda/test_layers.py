"""Norms, rotations, KV writes and embeddings on the kernels agree with their formulas, and these with `ops.layers`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.ops.cuda import layers
from forerun.ops.cuda.table import StepRows
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
@given(SIZES, DTYPES, st.sampled_from([1.0, 0.25]))
def test_sums_and_their_norms_agree(size, dtype, scale):
    residual, update, weight = random(*size), random(*size, seed=1, dtype=dtype), random(size[1], seed=2)
    both = []
    for module in (layers, kernels):
        stream, normed = residual.clone(), torch.empty(size, dtype=dtype, device=DEVICE)
        module.add_rms_norm(stream, update, weight, normed, eps=EPS, scale=scale)
        both.append((stream, normed))
    (expected, normed), (found, found_normed) = both
    assert_close(found, expected)
    assert_close(found_normed, normed)


@few
@given(
    st.integers(1, 4),
    st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    st.sampled_from([(8, 8), (12, 8), (16, 4)]),
    DTYPES,
    st.sampled_from([None, "shared", "each"]),
)
def test_rotations_and_writes_agree(num_rows, heads, dims, dtype, norms):
    (num_heads, num_kv_heads), (dim, rotated) = heads, dims
    rows = StepRows.empty(num_rows, 1, longest_path=1, device=DEVICE)
    rows.positions.copy_(ints(*range(3, 3 + num_rows)))
    rows.kv_slots[: num_rows - 1] = torch.arange(num_rows - 1, device=DEVICE) * 3  # the last row is padding
    rotation = Rotary(RopeConfig(dim=rotated, theta=100.0), dtype=torch.float32, device=DEVICE).rotation(
        torch.arange(16, device=DEVICE)
    )
    qkv = random(num_rows, num_heads + 2 * num_kv_heads, dim, dtype=dtype)
    options = {"eps": EPS}
    if norms is not None:
        options["query_norm"] = random(*((num_heads, dim) if norms == "each" else (dim,)), seed=5)
        options["key_norm"] = random(*((num_kv_heads, dim) if norms == "each" else (dim,)), seed=6)
    both = []
    for module in (layers, kernels):
        query = torch.empty(num_rows, num_heads, dim, dtype=dtype, device=DEVICE)
        keys, values = (torch.zeros(12, num_kv_heads, dim, dtype=dtype, device=DEVICE) for _ in range(2))
        module.rotate_and_write(qkv, query, keys, values, rows, rotation, **options)
        both.append((query, keys, values))
    for found, expected in zip(both[1], both[0], strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_are_the_rows_of_the_table(dtype):
    rows = StepRows.empty(3, 1, longest_path=1, device=DEVICE)
    rows.tokens.copy_(ints(4, 0, 2))
    table = random(5, 33, dtype=dtype)
    for module in (layers, kernels):
        residual = torch.empty(3, 33, device=DEVICE)
        module.embed(rows, table, residual, scale=0.5)
        assert torch.equal(residual, table[[4, 0, 2]].float() * 0.5)
