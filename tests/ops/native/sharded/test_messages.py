"""A pass goes to the other ranks in a few arrays, and they read of it what rank 0's kernels read."""

from __future__ import annotations

import ctypes
import pickle

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.core.batch import ForwardBatch, LayerKVSpec, SequenceRows
from forerun.kv.cache import KVCache
from forerun.ops.native.attention import NativeAttention
from forerun.ops.native.sharded.messages import ComputeLayers
from forerun.ops.native.structs import SEQUENCE_WORDS
from forerun.ops.rotary import Rotation
from tests.native import KERNELS, needs_kernels

pytestmark = needs_kernels
CACHE = KVCache(
    [LayerKVSpec(num_kv_heads=1, key_dim=2, value_dim=2)],
    num_blocks=64,
    block_size=4,
    dtype=torch.float32,
    device=torch.device("cpu"),
)


@st.composite
def sequences(draw):
    num_context, num_rows = draw(st.integers(0, 20)), draw(st.integers(1, 6))
    blocks = draw(st.lists(st.integers(0, 63), min_size=8, max_size=10))
    mask = None
    if draw(st.booleans()):
        width = num_rows + draw(st.integers(0, min(3, num_context)))
        mask = torch.tensor(draw(st.lists(st.booleans(), min_size=num_rows * width, max_size=num_rows * width)))
        mask = mask.view(num_rows, width)
    return SequenceRows(
        num_context=num_context,
        num_rows=num_rows,
        block_ids=np.array(blocks, dtype=np.int32),
        tree_mask=mask,
        num_hidden=draw(st.integers(0, 1)),
    )


def read(struct):
    """All that the kernels read of a pass."""
    words = np.ctypeslib.as_array(
        (ctypes.c_int64 * (struct.num_sequences * SEQUENCE_WORDS)).from_address(struct.sequences)
    )
    found = []
    for first_row, num_context, num_rows, blocks, mask, width, num_hidden in words.reshape(-1, SEQUENCE_WORDS).tolist():
        ids = list((ctypes.c_int32 * 8).from_address(blocks))
        seen = bytes((ctypes.c_uint8 * (num_rows * width)).from_address(mask)) if mask else None
        found.append((first_row, num_context, num_rows, ids, seen, width, num_hidden))
    slots = list((ctypes.c_int64 * struct.num_rows).from_address(struct.slots))
    return struct.num_rows, slots, struct.block_size, found


@given(st.lists(sequences(), min_size=1, max_size=5))
def test_a_pass_arrives_as_it_was(rows):
    num_rows = sum(one.num_rows for one in rows)
    batch = ForwardBatch(
        token_ids=torch.zeros(num_rows, dtype=torch.int64),
        positions=torch.zeros(num_rows, dtype=torch.int64),
        slot_mapping=torch.arange(num_rows) * 3 % 256,
        sequences=rows,
        block_size=4,
        logits_rows=torch.empty(0, dtype=torch.int64),
    )
    attend = NativeAttention(next(iter(KERNELS.values()))).begin(batch, CACHE)
    rotations = [None, Rotation(torch.rand(num_rows, 1, 2), torch.rand(num_rows, 1, 2))]
    sent = ComputeLayers.of(attend, rotations, cache=3, first=1, last=4)
    arrived = pickle.loads(pickle.dumps(sent, protocol=pickle.HIGHEST_PROTOCOL))
    assert read(arrived.rows.struct()) == read(attend.struct)
    assert (arrived.cache, arrived.first, arrived.last) == (3, 1, 4)
    nothing, rotation = arrived.rotations_of_pass()
    assert nothing is None
    assert torch.equal(rotation.cos, rotations[1].cos)
    assert torch.equal(rotation.sin, rotations[1].sin)
