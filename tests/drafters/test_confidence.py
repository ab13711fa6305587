"""How far a match is trusted."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.drafters.confidence import check_threshold, confident_length, discount
from forerun.errors import ConfigError

lengths = st.integers(1, 40)
thresholds = st.floats(0.01, 1.0)


@given(lengths)
def test_a_longer_match_is_discounted_less_and_none_wholly(match_length):
    assert 0 < discount(match_length + 1) < discount(match_length) < 1


@given(match_length=lengths, threshold=thresholds, most=st.integers(0, 60))
def test_a_draft_is_as_long_as_all_of_it_is_likely_enough(match_length, threshold, most):
    def confidence(num_tokens):
        return prod(1 - discount(match_length + i) for i in range(num_tokens))

    length = confident_length(match_length, threshold=threshold, most=most)
    assert 0 <= length <= most
    assert confidence(length) >= threshold or not length
    assert length == most or confidence(length + 1) < threshold


@given(match_length=lengths, most=st.integers(0, 60))
def test_a_threshold_of_zero_trusts_every_match(match_length, most):
    assert confident_length(match_length, threshold=0.0, most=most) == most


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), "0.5", True, None])
def test_a_threshold_that_is_no_probability_is_refused(value):
    with pytest.raises(ConfigError, match="draft_confidence_threshold"):
        check_threshold(value)
