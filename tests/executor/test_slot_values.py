"""What is noted for a slot stands in the tensors after it was sent, and nothing beside it has changed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.executor.slot_values import SlotValues

NUM_SLOTS = 5


def tensors():
    return {
        "seeds": torch.arange(NUM_SLOTS, dtype=torch.int64) - 2,
        "temperature": torch.full((NUM_SLOTS,), 0.5),
        "top_p": torch.full((NUM_SLOTS,), 0.9, dtype=torch.float64),
        "stop_ids": torch.full((NUM_SLOTS, 3), -1, dtype=torch.int32),
    }


VALUES = {
    "seeds": st.integers(-(2**63), 2**63 - 1),
    "temperature": st.floats(0, 2, width=32),
    "top_p": st.floats(0, 1),
    "stop_ids": st.lists(st.integers(-1, 2**31 - 1), min_size=3, max_size=3),
}


@given(st.data())
def test_what_was_noted_stands_where_it_was_noted_and_nowhere_else(data):
    values, expected = SlotValues(tensors()), tensors()
    for _ in range(2):
        for name in data.draw(st.sets(st.sampled_from(sorted(VALUES)))):
            for slot in data.draw(st.sets(st.integers(0, NUM_SLOTS - 1))):
                given = data.draw(VALUES[name])
                values.note(name, slot, given)
                expected[name][slot] = torch.tensor(given, dtype=expected[name].dtype)
        values.send()
    assert all(torch.equal(values.tensors[name], expected[name]) for name in expected)


def test_what_is_forgotten_is_not_sent():
    values = SlotValues(tensors())
    values.note("temperature", 1, 1.5)
    values.forget()
    values.note("temperature", 2, 0.25)
    values.send()
    assert values.tensors["temperature"].tolist() == [0.5, 0.5, 0.25, 0.5, 0.5]


def test_each_tensor_begins_at_sixteen_bytes():
    values = SlotValues(tensors())
    assert all(tensor.data_ptr() % 16 == values._buffer.data_ptr() % 16 for tensor in values.tensors.values())


def test_a_slot_is_written_whole():
    with pytest.raises(AssertionError, match="all values of a slot"):
        SlotValues(tensors()).note("stop_ids", 0, np.zeros(2))
