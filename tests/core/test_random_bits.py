"""Noise is uniform, exponential, independent, and a function of its coordinates only."""

import itertools
import math

import numpy as np
import pytest

from forerun.core.random_bits import Stream, child_seed, exponential, key_of, uniform, uniform_row, uniforms

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


def exponential_row(*coordinates, vocab_size=NUM_DRAWS):
    return exponential(uniform_row(key_of(*coordinates), vocab_size))


def rows_as_uniforms(**coordinates):
    """What noise is a distribution function's inverse of, found again by the function itself."""
    noise = exponential_row(*{"seed": 1, "position": 2, "stream": Stream.TARGET, "index": 0, **coordinates}.values())
    return -np.expm1(-noise)


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
    key = key_of(9, 4, Stream.TARGET, 0)
    assert np.array_equal(uniforms(key, token_ids), uniform_row(key, 32_000)[token_ids])


def test_drawing_does_not_change_the_token_ids():
    token_ids = np.array([5, 6])
    uniforms(key_of(0, 0, Stream.TARGET, 0), token_ids)
    assert token_ids.tolist() == [5, 6]


def test_noise_is_positive_and_finite():
    row = exponential_row(0, 0, Stream.TARGET, vocab_size=200_000)
    assert row.min() > 0
    assert np.isfinite(row).all()


@pytest.mark.parametrize("uniform", [2.0**-53, 2.0**-30, 1e-5, 0.25, 0.5, 0.75, 1.0 - 2.0**-53])
def test_noise_has_the_relative_precision_of_double_at_both_ends(uniform):
    assert exponential(np.array([uniform]))[0] == pytest.approx(-math.log1p(-uniform), rel=4e-16)


def test_noise_is_never_below_its_uniform_number_nor_above_its_odds():
    uniform = uniform_row(5, 200_000)
    noise = exponential(uniform)
    assert (noise >= uniform).all()
    assert (noise <= uniform / (1.0 - uniform) * (1 + 1e-15)).all()


def test_the_smallest_noise_of_many_rows_is_exponential_too():
    # The least of n exponentials is an exponential with rate n; noise with a coarse grid near 0 would bunch.
    num_rows, vocab_size = 2000, 1000
    least = np.array(
        [exponential_row(0, row, Stream.TARGET, 0, vocab_size=vocab_size).min() for row in range(num_rows)]
    )
    assert chi_square(-np.expm1(-least * vocab_size), num_bins=32) < limit(31)


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
