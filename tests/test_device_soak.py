"""On a CPU what `tests/gpu/test_soak.py` asks of a GPU, for a second; and that what is left behind is found."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.contract.drafters import CASES
from tests.device_soak import Soak
from tests.engines import tiny_llm


def tensor_bytes():
    """Bytes of all tensors that there are."""
    gc.collect()
    storages = {}
    for one in gc.get_objects():
        if type(one) is torch.Tensor:
            storage = one.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "device_step"), [("ngram", True), ("ngram", False), ("eagle3", True), ("eagle3", False)]
)
def test_nothing_is_held_after_a_round(name, device_step):
    llm = tiny_llm(CASES[name], device_step=device_step, max_num_seqs=4, num_gpu_blocks_override=96)
    soak = Soak(llm, tensor_bytes, most_growth=64 << 10)
    soak.run(0)
    assert soak.failures == []
    assert (soak.num_rounds, len(soak.held)) == (5, 5)
    assert soak.num_requests > 5
    assert llm.stats.speculation.num_draft_tokens > 0


def test_memory_that_grows_is_found():
    taken = iter(range(0, 100, 10))
    soak = Soak(tiny_llm(), lambda: next(taken), most_growth=5)
    soak.run(0)
    assert soak.failures == ["20 bytes more are held than after the first rounds (20)"]


def test_a_sequence_that_is_left_behind_is_found():
    llm = tiny_llm()
    llm.executor.release = lambda ended: None
    soak = Soak(llm, lambda: 0, most_growth=0)
    soak.run(0)
    assert any("sequences are known to the executor" in failure for failure in soak.failures)
