"""The likeliest tokens of rows in torch, against sorting."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from forerun.ops.candidates import ROWS_AT_ONCE, find_candidates

FEW_VALUES = st.sampled_from([-math.inf, -1.5, -1e-45, -0.0, 0.0, 1e-45, 2.0, 3e38, math.inf, math.nan])


def sorted_candidates(row, num_candidates):
    """NaN first, then the highest logit, then the lowest id."""
    return sorted(range(len(row)), key=lambda i: (not math.isnan(row[i]), -row[i], i))[:num_candidates]


@given(row=st.lists(FEW_VALUES | st.floats(width=32), min_size=1, max_size=40), data=st.data())
def test_candidates_are_the_first_of_the_sorted_row(row, data):
    num_candidates = data.draw(st.integers(0, min(len(row), 16)))
    logits = torch.tensor([row, row[::-1]])
    found = find_candidates(logits, num_candidates)
    for one, own, token_ids, values in zip(logits, logits.tolist(), found.token_ids, found.logits, strict=True):
        assert token_ids.tolist() == sorted_candidates(own, num_candidates)
        assert torch.equal(values.view(torch.int32), one[token_ids.long()].view(torch.int32))
    assert (found.token_ids.dtype, found.logits.dtype) == (torch.int32, torch.float32)


class MostBytes(TorchDispatchMode):
    """The size of the largest tensor that an operation gives."""

    found = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **kwargs or {})
        tensors = outputs if isinstance(outputs, (tuple, list)) else [outputs]
        self.found = max(self.found, *(one.nbytes for one in tensors if isinstance(one, torch.Tensor)), 0)
        return outputs


def test_many_rows_take_little_memory_beside_their_logits():
    """On a GPU it is not measured at the start, and a CUDA graph of many rows holds all of it."""
    logits = torch.randn(5 * ROWS_AT_ONCE + 3, 1000)
    with MostBytes() as most:
        found = find_candidates(logits, 5)
    assert most.found == 8 * ROWS_AT_ONCE * 1000
    alone = [find_candidates(row[None], 5) for row in logits]
    assert torch.equal(found.token_ids, torch.cat([one.token_ids for one in alone]))
    assert torch.equal(found.logits, torch.cat([one.logits for one in alone]))


def test_no_rows_have_no_candidates():
    assert find_candidates(torch.empty(0, 9), 3).token_ids.shape == (0, 3)


def test_more_candidates_than_logits_are_refused():
    with pytest.raises(ValueError, match="6 candidates of 5 logits; ask for at most as many as there are"):
        find_candidates(torch.zeros(2, 5), 6)
