"""Noise in Triton's and torch's integers has the bits of NumPy's."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core import exact_math
from forerun.core.random_bits import Stream, key_of, uniform_row
from forerun.ops.cuda import noise
from tests.cuda import DEVICE, ints

from forerun.ops.cuda.kernels import noise as kernels  # isort: skip - tests.cuda comes first

SEEDS = st.integers(0, 2**64 - 1)


def signed(bits):
    return bits - (bits >> 63 << 64)


def int64s(values):
    return torch.tensor([signed(value) for value in values], dtype=torch.int64, device=DEVICE)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(SEEDS, st.integers(0, 2**31 - 1)), min_size=1, max_size=9))
def test_keys_are_those_of_the_host(places):
    seeds, positions = int64s([seed for seed, _ in places]), ints(*(position for _, position in places))
    expected = [signed(key_of(seed, position, Stream.TARGET, 0)) for seed, position in places]
    assert noise.row_keys(seeds, positions).tolist() == expected
    assert kernels.row_keys(seeds, positions).tolist() == expected


@settings(max_examples=10, deadline=None)
@given(st.lists(SEEDS, min_size=1, max_size=3), st.integers(1, 1100))
def test_uniform_numbers_are_those_of_the_host(keys, vocab_size):
    expected = np.stack([uniform_row(key, vocab_size) for key in keys])
    for module in (noise, kernels):
        found = torch.empty(expected.shape, dtype=torch.float64, device=DEVICE)
        module.uniform_rows(int64s(keys), found)
        assert np.array_equal(found.numpy(force=True), expected)


def test_logarithm_of_the_twin_is_the_hosts():
    values = np.concatenate([uniform_row(3, 1000), -np.log(uniform_row(4, 1000)), [1.0, 2.0**-53, 37.0]])
    assert np.array_equal(noise.log(torch.from_numpy(values)).numpy(), exact_math.log(values))
