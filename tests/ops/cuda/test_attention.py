"""Attention on the kernels agrees with the formula, and a row's bits are its own, whatever is computed beside it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.ops.cuda import attention, steps
from forerun.ops.cuda.table import DeviceTable, StepRows
from tests.cuda import DEVICE, random
from tests.ops.cuda.device_steps import MOST_DRAFTED
from tests.ops.cuda.device_steps import steps as random_steps

from forerun.ops.cuda.kernels import attention as kernels  # isort: skip - tests.cuda comes first

DIM = 16


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """So that short texts have several chunks, and these several blocks."""
    monkeypatch.setattr(kernels, "FIRST_CHUNKS", 2)
    if DEVICE.type == "cpu":  # less than tensor cores take
        monkeypatch.setattr(kernels, "LEAST_CHUNK", 8)
        monkeypatch.setattr(kernels, "BLOCK_KEYS", 8)
        monkeypatch.setattr(kernels, "TILE", 4)
    else:
        monkeypatch.setattr(kernels, "LEAST_CHUNK", kernels.BLOCK_KEYS)


def attend(module, step, rows, query, keys, values, **options):
    output = torch.full((*query.shape[:2], values.shape[2]), -7.0, dtype=query.dtype, device=DEVICE)
    options = {"block_size": step.block_size, "scale": DIM**-0.5, **options}
    module.attend(query, keys, values, output, rows, step.table.block_table, **options)
    return output


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "window": st.sampled_from([1, 5, 17, 100]),
        "soft_cap": st.sampled_from([1.5, 30.0]),
        "num_hidden": st.just(1),
        "sinks": st.just(True),
    },
)


@settings(max_examples=7, deadline=None)
@given(
    random_steps(most_tail=4),
    st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3)]),
    st.sampled_from([DIM, 24]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    OPTIONS,
)
def test_kernels_attend_as_the_formula_does(step, heads, value_dim, dtype, options):
    num_heads, num_kv_heads = heads
    steps.prepare(step.plan, step.table, step.rows, block_size=step.block_size)
    num_rows = len(step.rows.slots)
    query = random(num_rows, num_heads, DIM, dtype=dtype)
    keys = random(step.num_kv_slots, num_kv_heads, DIM, dtype=dtype, seed=1)
    values = random(step.num_kv_slots, num_kv_heads, value_dim, dtype=dtype, seed=2)
    if options.get("sinks"):
        options = {**options, "sinks": random(num_heads, seed=3)}
    if options.get("num_hidden"):  # a row at place 0 would see nothing
        step.rows.slots[step.rows.positions == 0] = -1
    expected = attend(attention, step, step.rows, query, keys, values, **options)
    found = attend(kernels, step, step.rows, query, keys, values, **options)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def only(rows, kept):
    """The rows `kept`, alone in a step."""
    alone = StepRows.empty(len(kept), 1, longest_path=MOST_DRAFTED, device=DEVICE)
    for name in ("slots", "positions", "num_linear", "path_slots"):
        getattr(alone, name).copy_(getattr(rows, name)[kept])
    return alone


@settings(max_examples=3, deadline=None)
@given(random_steps(most_tail=3))
def test_a_row_alone_has_the_bits_that_it_has_among_others(step):
    steps.prepare(step.plan, step.table, step.rows, block_size=step.block_size)
    query = random(len(step.rows.slots), 4, DIM)
    keys, values = random(step.num_kv_slots, 2, DIM, seed=1), random(step.num_kv_slots, 2, DIM, seed=2)
    together = attend(kernels, step, step.rows, query, keys, values)
    for row in range(len(query)):
        alone = attend(kernels, step, only(step.rows, [row]), query[row : row + 1], keys, values)
        assert torch.equal(alone[0], together[row])


@settings(max_examples=4, deadline=None)
@given(random_steps(most_tail=3))
def test_a_tree_has_the_bits_of_its_paths_as_chains(step):
    """A node's path is written to the cache as a chain of another slot, block for block elsewhere."""
    steps.prepare(step.plan, step.table, step.rows, block_size=step.block_size)
    rows, table = step.rows, step.table
    query = random(len(rows.slots), 2, DIM)
    keys, values = random(step.num_kv_slots, 1, DIM, seed=1), random(step.num_kv_slots, 1, DIM, seed=2)
    expected = attend(kernels, step, rows, query, keys, values)
    for row, slot in enumerate(rows.slots.tolist()):
        num_linear, position = int(rows.num_linear[row]), int(rows.positions[row])
        if slot < 0 or num_linear > position:
            continue
        chain = only(rows, [row])
        chain.num_linear.fill_(position + 1)
        path = rows.path_slots[row, : position + 1 - num_linear].long()
        places = torch.arange(num_linear, position + 1, device=DEVICE)
        at = table.block_table[slot, places // step.block_size].long() * step.block_size + places % step.block_size
        moved_keys, moved_values = keys.clone(), values.clone()
        moved_keys[at], moved_values[at] = keys[path], values[path]
        found = attend(kernels, step, chain, query[row : row + 1], moved_keys, moved_values)
        assert torch.equal(found[0], expected[row])


def test_padding_rows_are_not_written():
    rows = StepRows.empty(2, 1, longest_path=1, device=DEVICE)
    table = DeviceTable.empty(1, max_length=16, num_blocks=1, most_drafted=1, device=DEVICE)
    query, cache = random(2, 1, DIM), random(16, 1, DIM)
    for module in (attention, kernels):
        output = torch.full_like(query, -7.0)
        module.attend(query, cache, cache, output, rows, table.block_table, block_size=16, scale=1.0)
        assert (output == -7.0).all()


@settings(max_examples=3, deadline=None)
@given(random_steps(most_tail=3))
def test_bits_do_not_depend_on_how_many_programs_there_are_or_how_long_a_text_there_is_room_for(step):
    steps.prepare(step.plan, step.table, step.rows, block_size=step.block_size)
    query = random(len(step.rows.slots), 4, DIM)
    keys, values = random(step.num_kv_slots, 2, DIM, seed=1), random(step.num_kv_slots, 2, DIM, seed=2)
    expected = attend(kernels, step, step.rows, query, keys, values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "MOST_PROGRAMS", 1)
        assert torch.equal(attend(kernels, step, step.rows, query, keys, values), expected)
    table = step.table.block_table
    wider = replace(step, table=replace(step.table, block_table=torch.cat([table, torch.zeros_like(table)], 1)))
    assert torch.equal(attend(kernels, wider, step.rows, query, keys, values), expected)


def test_chunks_are_as_long_at_first_and_then_half_as_many_for_each_doubling():
    begins = [
        place for place in range(70_000) if place == 0 or attention.chunk_of(place) != attention.chunk_of(place - 1)
    ]
    lengths = [end - begin for begin, end in pairwise(begins)]
    assert lengths == [256] * 32 + [512] * 16 + [1024] * 16 + [2048] * 16 + [4096]
    assert [attention.chunk_of(begin) for begin in begins] == [*range(len(begins))]
    assert attention.chunk_of(131_071) == 95
