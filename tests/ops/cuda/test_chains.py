"""Rows of a network that drafts chains: by formula and on the kernels the same, and as a text and its chain ask for."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.ops.cuda import chains
from forerun.ops.cuda.chains import ChainPlan
from forerun.ops.cuda.table import DeviceTable, StepRows
from tests.cuda import DEVICE, assert_equal_records, copy_of, ints

from forerun.ops.cuda.kernels import chains as kernels  # isort: skip - tests.cuda comes first

NUM_SLOTS, MAX_LENGTH, MOST_DRAFTED, MOST_ROWS, SCRATCH = 4, 40, 5, 7, 6
FIRST_SCRATCH = 1000  # the first scratch block


@dataclass
class Drafting:
    """Texts in a table and a plan to draft after some of them."""

    table: DeviceTable
    plan: ChainPlan
    block_size: int
    unread: list[int]  # tokens of each planned text that are not read


@st.composite
def draftings(draw):
    block_size = draw(st.sampled_from([1, 4, 16]))
    num_blocks = -(-MAX_LENGTH // block_size)
    table = DeviceTable.empty(
        NUM_SLOTS, max_length=MAX_LENGTH, num_blocks=num_blocks, most_drafted=MOST_DRAFTED, device=DEVICE
    )
    source = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    table.tokens.copy_(torch.randint(50, table.tokens.shape, generator=source))
    table.block_table.copy_(torch.randperm(NUM_SLOTS * num_blocks, generator=source).view(NUM_SLOTS, num_blocks))
    table.lengths.copy_(ints(*(draw(st.integers(1, 30)) for _ in range(NUM_SLOTS))))
    slots = draw(st.permutations(range(NUM_SLOTS)))[: draw(st.integers(1, NUM_SLOTS))]
    slots = [draw(st.sampled_from([slot, slot, slot, -1])) for slot in slots]
    lengths = [int(table.lengths[slot]) if slot >= 0 else 1 for slot in slots]
    unread = [draw(st.integers(1, min(MOST_ROWS, length))) for length in lengths]
    plan = ChainPlan(
        slots=ints(*slots),
        starts=ints(*(length - count for length, count in zip(lengths, unread, strict=True))),
        limits=ints(*(draw(st.integers(0, MOST_DRAFTED)) for _ in slots)),
        blocks=torch.full((NUM_SLOTS, num_blocks + SCRATCH), -7, dtype=torch.int32, device=DEVICE),
    )
    return Drafting(table, plan, block_size, unread)


def draft(module, case, tokens):
    """All that a step's drafting writes: the plan, the rows read, the rows of each pass, the table."""
    table, plan, size = copy_of(case.table), copy_of(case.plan), case.block_size
    module.take_blocks(plan, table, block_size=size, first_scratch=FIRST_SCRATCH, scratch_per_slot=SCRATCH)
    count = len(plan.slots)
    read = StepRows.empty(count * MOST_ROWS, 0, longest_path=1, device=DEVICE)
    last_rows = torch.empty(count, dtype=torch.int64, device=DEVICE)
    slots_before = torch.empty(count * MOST_ROWS, dtype=torch.int64, device=DEVICE)
    module.read_texts(plan, table, read, last_rows, slots_before, block_size=size)
    passes = []
    for depth, drafted in enumerate(tokens):
        rows = StepRows.empty(count, 0, longest_path=1, device=DEVICE)
        module.extend(plan, table, ints(*drafted[:count]), rows, depth=depth, block_size=size)
        passes.append(rows)
    return plan, read, last_rows, slots_before, passes, table


TOKENS = st.lists(
    st.lists(st.integers(-1, 40), min_size=NUM_SLOTS, max_size=NUM_SLOTS), min_size=1, max_size=MOST_DRAFTED
)


@settings(max_examples=20, deadline=None)
@given(draftings(), TOKENS)
def test_kernels_lay_out_what_the_formulas_do(case, tokens):
    expected, found = draft(chains, case, tokens), draft(kernels, case, tokens)
    for index in (0, 1, 5):
        assert_equal_records(found[index], expected[index])
    assert torch.equal(found[2], expected[2])
    assert torch.equal(found[3], expected[3])
    for ours, theirs in zip(found[4], expected[4], strict=True):
        assert_equal_records(ours, theirs)


def slot_of_place(case, plan, slot, place):
    """Where a place of a text or of its draft lies, from the text's own blocks."""
    used = -(-(int(case.table.lengths[slot]) - 1) // case.block_size)
    block, offset = divmod(place, case.block_size)
    if block < used:
        return int(case.table.block_table[slot, block]) * case.block_size + offset
    return (FIRST_SCRATCH + slot * SCRATCH + block - used) * case.block_size + offset


@settings(max_examples=40, deadline=None)
@given(draftings(), TOKENS)
def test_unread_tokens_are_read_and_chains_follow_them_in_blocks_that_nobody_else_has(case, tokens):
    plan, read, last_rows, slots_before, passes, table = draft(chains, case, tokens)
    for n, slot in enumerate(plan.slots.tolist()):
        own = slice(n * MOST_ROWS, (n + 1) * MOST_ROWS)
        if slot < 0 or plan.limits[n] == 0:
            assert (read.slots[own] == -1).all()
            assert all(rows.slots[n] == -1 for rows in passes)
            continue
        length, count = int(case.table.lengths[slot]), case.unread[n]
        places = list(range(length - count, length))
        assert int(last_rows[n]) == own.start + count - 1
        assert read.tokens[own][:count].tolist() == case.table.tokens[slot, places].tolist()
        assert read.positions[own][:count].tolist() == places
        assert read.kv_slots[own][:count].tolist() == [slot_of_place(case, plan, slot, place) for place in places]
        assert slots_before[own][:count].tolist() == [slot_of_place(case, plan, slot, max(i - 1, 0)) for i in places]
        assert (read.slots[own][count:] == -1).all()
        chain = []
        for rows, drafted in zip(passes, tokens, strict=True):
            if len(chain) == int(plan.limits[n]) or drafted[n] < 0:
                break
            chain.append(drafted[n])
            if len(chain) == int(plan.limits[n]):
                assert rows.slots[n] == -1, "nothing is drafted after a chain's last token"
                continue
            place = length + len(chain) - 1
            assert (rows.tokens[n], rows.positions[n], rows.slots[n]) == (drafted[n], place, slot)
            assert rows.kv_slots[n] == slot_of_place(case, plan, slot, place)
        assert table.draft_tokens[slot, : int(table.draft_sizes[slot])].tolist() == chain
        assert table.draft_parents[slot, : len(chain)].tolist() == list(range(-1, len(chain) - 1))


@settings(max_examples=40, deadline=None)
@given(draftings(), st.integers(1, MOST_DRAFTED), st.data())
def test_chains_of_tokens_predicted_at_once_end_at_the_limit_or_before_no_token(case, depth, data):
    slots, limits = case.plan.slots, case.plan.limits
    tokens = st.lists(st.sampled_from([7, 8, 9, -1]), min_size=depth, max_size=depth)
    drafted = torch.tensor([data.draw(tokens) for _ in slots], dtype=torch.int32, device=DEVICE)
    expected, found = copy_of(case.table), copy_of(case.table)
    chains.write_chains(expected, slots, limits, drafted)
    kernels.write_chains(found, slots, limits, drafted)
    assert_equal_records(found, expected)
    for slot in range(NUM_SLOTS):
        if slot not in slots.tolist():
            assert torch.equal(expected.draft_tokens[slot], case.table.draft_tokens[slot])
            continue
        n = slots.tolist().index(slot)
        chain = list(itertools.takewhile(lambda token: token >= 0, drafted[n, : int(limits[n])].tolist()))
        assert expected.draft_tokens[slot, : int(expected.draft_sizes[slot])].tolist() == chain
        assert expected.draft_parents[slot, : len(chain)].tolist() == list(range(-1, len(chain) - 1))


@settings(max_examples=40, deadline=None)
@given(draftings(), st.integers(0, MOST_DRAFTED), st.data())
def test_masks_follow_a_text_in_blocks_that_nobody_else_has(case, most_masks, data):
    counts = ints(*(data.draw(st.integers(-1, most_masks)) for _ in case.plan.slots))
    laid_out = []
    for module in (chains, kernels):
        plan, rows = copy_of(case.plan), StepRows.empty(len(counts) * most_masks, 0, longest_path=1, device=DEVICE)
        options = {"first_scratch": FIRST_SCRATCH, "scratch_per_slot": SCRATCH}
        module.take_blocks(plan, case.table, block_size=case.block_size, **options)
        module.place_masks(plan, case.table, counts, rows, token_id=42, block_size=case.block_size)
        laid_out.append(rows)
    assert_equal_records(laid_out[1], laid_out[0])
    for n, slot in enumerate(plan.slots.tolist()):
        count = max(int(counts[n]), 0) if slot >= 0 else 0
        masks, behind = (slice(n * most_masks + first, (n + 1) * most_masks) for first in (0, count))
        assert (rows.slots[behind] == -1).all()
        assert (rows.kv_slots[behind] == -1).all()
        places = [int(case.table.lengths[slot]) + i for i in range(count)]
        assert rows.tokens[masks][:count].tolist() == [42] * count
        assert rows.positions[masks][:count].tolist() == places
        assert rows.kv_slots[masks][:count].tolist() == [slot_of_place(case, plan, slot, place) for place in places]
