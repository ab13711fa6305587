"""Noise is uniform, exponential, independent, and a function of its coordinates only."""

import itertools
import math

import numpy as np
import pytest

from forerun.core.random_bits import Stream, child_seed, exponential, exponential_row, uniform

NUM_DRAWS = 20_000
PINNED_UNIFORMS = [0.30868980060872697, 0.950138076779902, 0.14967804746509572]
PINNED_CHILD_SEEDS = [6257028094351040932, 6682477938913305704]


def chi_square(values, *, num_bins):
    counts = np.bincount((np.asarray(values) * num_bins).astype(int), minlength=num_bins)
    expected = len(values) / num_bins
    return float(((counts - expected) ** 2 / expected).sum())


def limit(degrees):
    return degrees + 10 * math.sqrt(2 * degrees)


def correlation(left, right):
    return abs(float(np.corrcoef(left, right)[0, 1]))


def rows_as_uniforms(**coordinates):
    noise = exponential_row(vocab_size=NUM_DRAWS, **{"seed": 1, "position": 2, "stream": Stream.TARGET, **coordinates})
    return -np.expm1(-noise.astype(np.float64))


@pytest.mark.parametrize("moving", ["seed", "position", "index"])
def test_uniform_is_uniform_along_each_coordinate(moving):
    fixed = {"seed": 7, "position": 3, "stream": Stream.ACCEPTANCE, "index": 0}
    draws = [uniform(**{**fixed, moving: i}) for i in range(NUM_DRAWS)]
    assert chi_square(draws, num_bins=64) < limit(63)


def test_successive_positions_are_independent():
    draws = [uniform(5, position, Stream.ACCEPTANCE) for position in range(NUM_DRAWS)]
    pairs = [(int(a * 8) * 8 + int(b * 8)) / 64 for a, b in itertools.pairwise(draws)]
    assert chi_square(pairs, num_bins=64) < limit(63)


def test_exponential_row_has_the_exponential_distribution():
    assert chi_square(rows_as_uniforms(), num_bins=64) < limit(63)


@pytest.mark.parametrize(
    "other",
    [{"seed": 2}, {"position": 3}, {"index": 1}, *({"stream": s} for s in Stream if s is not Stream.TARGET)],
    ids=str,
)
def test_rows_that_differ_in_one_coordinate_are_uncorrelated(other):
    assert correlation(rows_as_uniforms(), rows_as_uniforms(**other)) < 5 / math.sqrt(NUM_DRAWS)


def test_exchanging_seed_and_position_gives_other_noise():
    assert uniform(1, 2, Stream.TARGET) != uniform(2, 1, Stream.TARGET)


def test_noise_of_some_tokens_is_theirs_in_the_row():
    token_ids = np.array([0, 3, 4999, 31_000])
    row = exponential_row(9, 4, Stream.TARGET, vocab_size=32_000)
    assert np.array_equal(exponential(9, 4, Stream.TARGET, token_ids=token_ids), row[token_ids])


def test_drawing_does_not_change_the_token_ids():
    token_ids = np.array([5, 6])
    exponential(0, 0, Stream.TARGET, token_ids=token_ids)
    assert token_ids.tolist() == [5, 6]


def test_noise_is_positive_finite_and_fp32():
    row = exponential_row(0, 0, Stream.TARGET, vocab_size=200_000)
    assert row.dtype == np.float32
    assert row.min() > 0
    assert np.isfinite(row).all()


def test_the_smallest_noise_keeps_its_relative_precision():
    # Noise computed as -log(uniform in fp32) would fall on multiples of 2**-24 near 0.
    smallest = np.sort(exponential_row(0, 0, Stream.TARGET, vocab_size=500_000).astype(np.float64))[:20]
    steps = smallest * 2**24
    assert np.abs(steps - steps.round()).max() > 0.1


@pytest.mark.parametrize("seed", [0, 2**63 - 1, -(2**63), 2**64 + 5])
def test_any_integer_is_a_seed(seed):
    assert 0.0 < uniform(seed, 0, Stream.TARGET) < 1.0


def test_noise_is_the_same_on_every_machine_and_in_every_release():
    drawn = [uniform(seed, position, stream) for seed, position, stream in ((0, 0, 1), (1, 2, 3), (-5, 100, 4))]
    assert drawn == PINNED_UNIFORMS


def test_child_seeds_are_distinct_and_stable():
    seeds = [child_seed(42, index) for index in range(1000)]
    assert len(set(seeds)) == 1000
    assert seeds[:2] == PINNED_CHILD_SEEDS
    assert all(0 <= seed < 2**63 for seed in seeds)
