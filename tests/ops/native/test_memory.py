"""Memory for weights: side by side, apart from each other, alive as long as it is used."""

from __future__ import annotations

import gc

import pytest
import torch

from forerun.ops.native.memory import CHUNK, Arena


def test_tensors_do_not_overlap():
    arena = Arena()
    tensors = [arena.empty((rows, 3), torch.float32).fill_(rows) for rows in range(1, 40)]
    assert all(tensor.eq(rows).all() for rows, tensor in enumerate(tensors, start=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_tensors_begin_at_cache_lines(dtype):
    arena = Arena()
    tensors = [arena.empty((5, 7), dtype) for _ in range(10)]
    assert {(tensor.data_ptr() % 64, tensor.shape, tensor.dtype) for tensor in tensors} == {(0, (5, 7), dtype)}


def test_tensors_larger_than_a_chunk_are_given():
    arena = Arena()
    first, large, last = (arena.empty((size,), torch.int8) for size in (10, CHUNK + 1, 10))
    assert len(large) == CHUNK + 1
    assert len({tensor.data_ptr() for tensor in (first, large, last)}) == 3


def test_a_tensor_outlives_its_arena():
    tensor = Arena().empty((1000,), torch.float32).fill_(7)
    gc.collect()
    assert tensor.eq(7).all()
