"""The candidates that the kernels find while the head computes, against their torch twin, bit by bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.batch import MOST_CANDIDATES
from forerun.ops.candidates import find_candidates
from forerun.ops.native.layers import PackedHead
from tests.native import BF16, FP32, every_format, every_level, generator, packed_linear, threads


def assert_same(found, expected):
    """The same tokens, and logits of the same bits."""
    assert torch.equal(found.token_ids, expected.token_ids)
    assert torch.equal(found.logits.view(torch.int32), expected.logits.view(torch.int32))


def with_ties(outputs, inputs, random):
    """Weights of which many outputs have the same, so that their logits are equal."""
    return torch.randn(-(-outputs // 3), inputs, generator=random).repeat(3, 1)[:outputs]


@every_level
@every_format
@settings(max_examples=25)
@given(
    rows=st.integers(1, 40),
    outputs=st.integers(1, 300),
    num_candidates=st.integers(1, MOST_CANDIDATES),
    scale=st.sampled_from([1.0, 0.3, 1e-40]),
    soft_cap=st.sampled_from([None, 30.0, 0.01]),
    num_threads=st.integers(1, 3),
    seed=st.integers(0, 2**20),
)
def test_candidates_are_those_of_the_stored_logits(
    kernels, weight_format, rows, outputs, num_candidates, scale, soft_cap, num_threads, seed
):
    random, num_candidates = generator(seed), min(num_candidates, outputs)
    linear = packed_linear(kernels, with_ties(outputs, 24, random), weight_format=weight_format)
    head, x = PackedHead(linear, scale, soft_cap), 3 * torch.randn(rows, 24, generator=random)
    with threads(kernels, num_threads):
        logits, found = head.with_candidates(x, num_candidates)
        unstored = head.candidates(x, num_candidates)
    assert torch.equal(logits, head(x))
    assert_same(found, find_candidates(logits, num_candidates))
    assert_same(unstored, found)


@every_level
@every_format
def test_a_rows_candidates_do_not_depend_on_the_rows_beside(kernels, weight_format):
    head = PackedHead(packed_linear(kernels, torch.randn(500, 24), weight_format=weight_format))
    x = torch.randn(300, 24)
    alone = [head.candidates(row[None], 8) for row in x]
    for count in (2, 5, 8, 16, 300):
        together = head.candidates(x[:count], 8)
        assert torch.equal(together.token_ids, torch.cat([one.token_ids for one in alone[:count]]))
        assert torch.equal(together.logits, torch.cat([one.logits for one in alone[:count]]))


@every_level
def test_ties_across_the_shares_of_threads_go_to_the_lowest_ids(kernels):
    head = PackedHead(packed_linear(kernels, torch.ones(400, 4), weight_format=FP32))
    for num_threads in (1, 2, 3):
        with threads(kernels, num_threads):
            found = head.candidates(torch.ones(3, 4), 16)
        assert found.token_ids.tolist() == [list(range(16))] * 3


@every_level
@pytest.mark.parametrize("num_threads", [1, 3])
@settings(max_examples=25)
@given(places=st.lists(st.tuples(st.integers(0, 99), st.sampled_from([math.nan, math.inf, -math.inf])), max_size=30))
def test_what_is_not_finite_is_ordered_as_in_the_twin(kernels, num_threads, places):
    weight = torch.linspace(-3, 3, 100)[:, None].repeat(1, 2)
    for place, value in places:
        weight[place] = value
    head, x = PackedHead(packed_linear(kernels, weight, weight_format=FP32)), torch.ones(2, 2)
    with threads(kernels, num_threads):
        logits, found = head.with_candidates(x, 12)
    assert torch.equal(found.token_ids, find_candidates(logits, 12).token_ids)
    assert found.logits.isnan().sum() == min(12, logits[0].isnan().sum()) * 2


@every_level
def test_a_row_of_minus_infinities_has_its_lowest_ids(kernels):
    head = PackedHead(packed_linear(kernels, torch.full((90, 2), -math.inf), weight_format=FP32))
    found = head.candidates(torch.ones(1, 2), 3)
    assert found.token_ids.tolist() == [[0, 1, 2]]
    assert found.logits.tolist() == [[-math.inf] * 3]


@every_level
def test_no_rows_have_no_candidates(kernels):
    head = PackedHead(packed_linear(kernels, torch.randn(90, 4), weight_format=BF16))
    assert head.candidates(torch.empty(0, 4), 5).token_ids.shape == (0, 5)


@every_level
@pytest.mark.parametrize(
    ("outputs", "wanted", "message"),
    [(5, 6, "more candidates are asked for than there are outputs"), (90, 17, "must be from 0 to 16")],
)
def test_more_candidates_than_outputs_or_than_the_kernels_keep_are_refused(kernels, outputs, wanted, message):
    head = PackedHead(packed_linear(kernels, torch.randn(outputs, 4), weight_format=BF16))
    for compute in (head.candidates, head.with_candidates):
        with pytest.raises(ValueError, match=message):
            compute(torch.randn(2, 4), wanted)
