"""Candidates and other numbers of a pass, in tensors, in NumPy and in arrays of the standard library."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch

from forerun.core.batch import CandidateArrays, CandidateTensors
from forerun.core.host_arrays import address_of, as_numpy

IDS, LOGITS = [[5, 1, 7], [2, 9, 0]], [[3.5, 2.0, 1.25], [0.5, -1.0, -2.0]]


def candidates_in_arrays():
    found = CandidateArrays(2, 3)
    found.ids[:] = array("i", np.ravel(IDS).tolist())
    found.values[:] = array("f", np.ravel(LOGITS).tolist())
    return found


def candidate_tensors():
    return CandidateTensors(torch.tensor(IDS, dtype=torch.int32), torch.tensor(LOGITS))


@pytest.mark.parametrize("make", [candidate_tensors, candidates_in_arrays])
def test_candidates_are_the_same_in_tensors_and_in_arrays(make):
    found = make()
    assert found.num_candidates == 3
    assert found.token_ids.dtype == torch.int32
    assert found.token_ids.tolist() == IDS
    assert found.logits.dtype == torch.float32
    assert found.logits.tolist() == LOGITS
    assert found.first() == ([5, 2], [3.5, 0.5])
    ids, logits = (as_numpy(numbers, np.float64, num_rows=2) for numbers in found.on_host())
    assert ids.tolist() == IDS
    assert logits.tolist() == LOGITS


def test_numbers_of_both_kinds_have_their_address():
    for numbers in (array("q", [4, 5, 6]), np.array([4, 5, 6])):
        assert np.ctypeslib.as_array((np.ctypeslib.ctypes.c_int64 * 3).from_address(address_of(numbers))).tolist() == [
            4,
            5,
            6,
        ]


def test_no_rows_are_an_array_of_none():
    assert as_numpy(array("i"), np.int32, num_rows=0).shape == (0, 0)
