"""Logarithm and weights are precise, and each is the operations that its docstring says, on every machine."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.exact_math import WEIGHT_BITS, log, nucleus_weight, weights

PINNED = {
    1.0: "0x0.0p+0",
    0.1: "-0x1.26bb1bbb55515p+1",
    36.7: "0x1.cd27c9e8e3110p+1",
    2.0**-53: "-0x1.25e4f7b2737fap+5",
}


@given(st.floats(2.0**-60, 64.0))
@settings(deadline=None, max_examples=300)
def test_log_is_right_within_two_units_of_the_last_place(value):
    found, expected = float(log(np.array([value]))[0]), math.log(value)
    assert abs(found - expected) <= 2 * math.ulp(expected)


@pytest.mark.parametrize("value", [1 - 2.0**-53, 1 + 2.0**-52, 1 - 1e-9, 0.9999])
def test_log_is_as_precise_beside_one(value):
    assert float(log(np.array([value]))[0]) == pytest.approx(math.log(value), rel=3e-16)


def test_log_has_the_same_bits_in_every_release():
    assert {value: float(log(np.array([value]))[0]).hex() for value in PINNED} == PINNED


def test_weights_are_exp_of_the_logits():
    logits = -np.logspace(-6, 1.4, 5000, dtype=np.float32)
    expected = np.exp(logits.astype(np.float64)) * 2.0**WEIGHT_BITS
    assert (np.abs(weights(logits) - expected) <= 6e-6 * expected + 1).all()


def test_the_largest_logit_weighs_one_and_tokens_that_are_out_nothing():
    found = weights(np.array([0.0, -29.0, -1e30, -math.inf], dtype=np.float32))
    assert found.tolist() == [2**WEIGHT_BITS, 0, 0, 0]


@pytest.mark.parametrize(
    ("total", "top_p", "expected"),
    [(10, 0.5, 5), (10, 0.51, 6), (10, 1e-9, 1), (1, 0.5, 1), (2**62, 1 - 2.0**-53, 2**62 - 2**9)],
)
def test_a_nucleus_weighs_its_share_rounded_up(total, top_p, expected):
    assert nucleus_weight(total, top_p) == expected
