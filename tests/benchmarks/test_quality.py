"""The arithmetic of the quality table."""

from __future__ import annotations

import math

import pytest

from benchmarks.quality import Measured, common_prefix, compare

REFERENCE = Measured(losses=[1.0, 2.0], texts=[[1, 2, 3], [4, 5]], agreed=5, num_judged=5)


def test_perplexity_is_of_the_mean_loss():
    assert compare("bf16", "", REFERENCE, REFERENCE).perplexity == pytest.approx(math.exp(1.5))


def test_a_loss_that_is_higher_everywhere_by_the_same_has_no_error():
    found = Measured(losses=[1.1, 2.1], texts=REFERENCE.texts, agreed=5, num_judged=5)
    row = compare("int8", "", found, REFERENCE)
    assert row.perplexity_ratio == pytest.approx(math.exp(0.1))
    assert row.perplexity_ratio_error == pytest.approx(0.0)


def test_answers_are_compared_one_by_one():
    found = Measured(losses=[1.0, 2.0], texts=[[1, 2, 9], [4, 5]], agreed=4, num_judged=5)
    row = compare("int8", "", found, REFERENCE)
    assert (row.num_identical, row.median_common_prefix, row.agreement) == (1, 2, 0.8)


@pytest.mark.parametrize(("text", "other", "length"), [([1, 2], [1, 2, 3], 2), ([1], [2], 0), ([], [1], 0)])
def test_common_prefix_ends_where_texts_part_or_one_ends(text, other, length):
    assert common_prefix(text, other) == length
