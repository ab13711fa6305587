"""The race without most of its logarithms has the winners of the race with all of them."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.random_bits import exponential, uniform_row
from forerun.ops.race import first_of_weights, naive_race, race


def random_logits(size, *, scale, seed, out=0.0):
    """Logits whose largest is 0; about a share `out` of them is -inf."""
    source = np.random.default_rng(seed)
    logits = np.clip(scale * source.standard_normal(size), -1e38, 1e38).astype(np.float32)
    logits[1:][source.random(size - 1) < out] = -math.inf
    return logits - logits.max()


@given(
    size=st.integers(1, 3000),
    scale=st.sampled_from([0.0, 0.01, 1.0, 8.0, 1000.0, 1e30]),
    out=st.sampled_from([0.0, 0.5, 0.999]),
    count=st.sampled_from([1, 2, 7, 5000]),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=200)
def test_the_race_agrees_with_its_naive_twin(size, scale, out, count, seed):
    logits = random_logits(size, scale=scale, seed=seed, out=out)
    assert race(logits, None, key=seed, count=count) == naive_race(logits, key=seed, count=count)


def test_some_tokens_race_with_the_noise_that_they_have_in_the_row():
    logits, key = random_logits(500, scale=2.0, seed=1), 77
    token_ids = np.arange(0, 500, 3)
    alone = np.full_like(logits, -math.inf)
    alone[token_ids] = logits[token_ids]
    assert race(logits[token_ids], token_ids, key=key, count=200) == naive_race(alone, key=key, count=200)


def test_a_token_that_is_out_never_wins():
    logits = np.array([-math.inf, 0.0, -math.inf], dtype=np.float32)
    assert all(race(logits, None, key=key, count=3) == [1] for key in range(50))


def test_the_likeliest_wins_in_its_share_of_races():
    logits = np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32))
    wins = np.bincount([race(logits, None, key=key)[0] for key in range(6000)], minlength=3)
    expected = 6000 * np.exp(logits)
    assert ((wins - expected) ** 2 / expected).sum() < 25


@pytest.mark.parametrize("size", [1, 5, 4000])
def test_weights_race_as_all_their_times_say(size):
    for key in range(30):
        weights = np.random.default_rng(key).random(size) ** 9
        weights[::3] = 0.0
        weights[-1] = 1e-12
        with np.errstate(divide="ignore"):
            times = exponential(uniform_row(key, size)) / weights
        assert first_of_weights(weights, key=key) == times.argmin()
