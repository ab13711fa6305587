"""Rows, match walk, commit and moves of the device's step: the kernels write what the formulas write, and these hold to `verify`."""

from __future__ import annotations

import dataclasses
from itertools import chain

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.draft import Draft
from forerun.core.sampling_params import SamplingParams
from forerun.core.step import SequenceSpec
from forerun.ops.cuda import steps
from forerun.ops.cuda.table import DevicePlan, DeviceTable, RuleTable, StepRows, Verdicts
from forerun.verify.matching import match
from tests.cuda import DEVICE, assert_equal_records, copy_of, ints, random
from tests.ops.cuda.device_steps import MOST_DRAFTED, sampled_tokens
from tests.ops.cuda.device_steps import steps as random_steps

from forerun.ops.cuda.kernels import steps as kernels  # isort: skip - tests.cuda comes first

few = settings(max_examples=20, deadline=None)


@few
@given(random_steps(), st.integers(1, 150), st.randoms(use_true_random=False))
def test_kernels_place_what_the_formula_does(step, num_changes, chance):
    table = step.table
    widths = [table.block_table.shape[1], MOST_DRAFTED, MOST_DRAFTED, 1, 1]
    places = [
        (what, slot, column)
        for what, width in enumerate(widths)
        for slot in range(len(table.lengths))
        for column in range(width)
    ]
    chosen = chance.sample(places, min(num_changes, len(places)))
    changes = ints(*chain.from_iterable(zip(*[(*place, 7 + i) for i, place in enumerate(chosen)], strict=True)))
    found = copy_of(table)
    steps.place(changes.view(4, -1), table)
    kernels.place(changes.view(4, -1), found)
    assert_equal_records(found, table)
    assert (table.draft_sizes >= 7).sum() == sum(what == 3 for what, *_ in chosen)


@few
@given(random_steps())
def test_kernels_lay_out_the_rows_of_the_formula(step):
    found = copy_of(step.rows)
    steps.prepare(step.plan, step.table, step.rows, block_size=step.block_size)
    kernels.prepare(step.plan, step.table, found, block_size=step.block_size)
    assert_equal_records(found, step.rows)


@few
@given(random_steps())
def test_a_row_reads_the_places_of_its_own_path_in_order(step):
    rows, table = step.rows, step.table
    steps.prepare(step.plan, table, rows, block_size=step.block_size)
    for n, slot in step.running:
        draft = Draft(tuple(table.draft_tokens[slot, : len(step.trees[n])].tolist()), step.trees[n])
        first, tail, start = int(rows.first_rows[n]), int(step.plan.tails[n]), int(table.computed[slot])
        assert rows.first_rows[n + 1] - first == tail + len(draft)
        for node in range(len(draft)):
            path = [first + tail + one for one in draft.path(node)]
            row = first + tail + node
            expected = [*rows.kv_slots[first : first + tail].tolist(), *rows.kv_slots[path].tolist()]
            num_linear = int(rows.num_linear[row])
            places = [
                int(table.block_table[slot, place // step.block_size]) * step.block_size + place % step.block_size
                for place in range(start, num_linear)
            ]
            num_apart = int(rows.positions[row]) + 1 - num_linear
            assert places + rows.path_slots[row, :num_apart].tolist() == expected
            assert rows.tokens[row] == draft.token_ids[node]


@few
@given(random_steps())
def test_tokens_are_drawn_after_the_last_committed_token_and_each_node(step):
    rows = step.rows
    steps.prepare(step.plan, step.table, rows, block_size=step.block_size)
    expected, firsts = [], []
    running = dict(step.running)
    for n, tail in enumerate(step.plan.tails.tolist()):
        firsts.append(len(expected))
        if n in running and step.plan.ends[n]:
            expected += range(int(rows.first_rows[n]) + tail - 1, int(rows.first_rows[n + 1]))
    assert rows.first_judged.tolist() == [*firsts, len(expected)]
    assert rows.judged.tolist() == expected + [-1] * (len(rows.judged) - len(expected))


@few
@given(random_steps())
def test_a_text_that_has_ended_gets_neither_rows_nor_tokens(step):
    for slot in step.plan.slots.tolist():
        if slot >= 0:
            step.table.ended[slot] = 1
    before = copy_of(step.table)
    for module in (steps, kernels):
        module.prepare(step.plan, step.table, step.rows, block_size=step.block_size)
        module.match(step.plan, step.table, step.rows, sampled_tokens(step, 0), step.verdicts)
        module.commit(step.plan, step.table, step.rules, step.verdicts)
        assert step.rows.slots.tolist() == [-1] * len(step.rows.slots)
        assert not step.verdicts.num_tokens.any()
        assert_equal_records(step.table, before)


@few
@given(random_steps(), st.integers(0, 2**31), st.booleans())
def test_a_text_ends_where_the_request_says(step, seed, missing):
    table, rules = step.table, step.rules
    steps.prepare(step.plan, table, step.rows, block_size=step.block_size)
    steps.match(step.plan, table, step.rows, sampled_tokens(step, seed, missing=missing), step.verdicts)
    running, lengths = step.running, table.lengths.tolist()
    steps.commit(step.plan, table, rules, step.verdicts)
    for n, slot in running:
        if not step.plan.ends[n]:
            assert not table.ended[slot]
            continue
        num_prompt, num_output = lengths[slot], int(table.lengths[slot]) - lengths[slot]
        spec = SequenceSpec(
            seq_id=0,
            prompt_ids=[0] * num_prompt,
            sampling=SamplingParams(min_tokens=max(0, int(rules.min_length[slot]) - num_prompt)),
            seed=0,
            max_length=int(rules.max_length[slot]),
            stop_token_ids=frozenset(rules.stop_ids[slot].tolist()),
        )
        found = table.tokens[slot, num_prompt : num_prompt + num_output].tolist()
        has_ended = any(spec.ends(i, token_id) for i, token_id in enumerate(found, start=1))
        assert bool(table.ended[slot]) == (has_ended or not found)
        assert table.lengths[slot] <= rules.max_length[slot]
        expected = step.verdicts.tokens[n, : int(step.verdicts.num_tokens[n])].tolist()
        assert found == expected[: spec.max_length - num_prompt]


@few
@given(random_steps(), st.integers(0, 2**31), st.booleans())
def test_kernels_walk_as_the_formula_does(step, seed, missing):
    steps.prepare(step.plan, step.table, step.rows, block_size=step.block_size)
    sampled = sampled_tokens(step, seed, missing=missing)
    found = copy_of(step.verdicts)
    steps.match(step.plan, step.table, step.rows, sampled, step.verdicts)
    kernels.match(step.plan, step.table, step.rows, sampled, found)
    assert_equal_records(found, step.verdicts)


@dataclasses.dataclass
class Sampled:
    tokens: list[int]  # after the last committed token, then after each node
    is_greedy = True

    def token(self, node):
        return self.tokens[node + 1]


@few
@given(random_steps(), st.integers(0, 2**31))
def test_the_walk_is_the_matching_verifiers(step, seed):
    steps.prepare(step.plan, step.table, step.rows, block_size=step.block_size)
    sampled = sampled_tokens(step, seed)
    steps.match(step.plan, step.table, step.rows, sampled, step.verdicts)
    for n, slot in step.running:
        if not step.plan.ends[n]:
            assert step.verdicts.num_tokens[n] == 0
            continue
        root, end = int(step.rows.first_rows[n] + step.plan.tails[n]) - 1, int(step.rows.first_rows[n + 1])
        draft = Draft(tuple(step.table.draft_tokens[slot, : end - root - 1].tolist()), step.trees[n])
        verdict = match(draft, Sampled(sampled[root:end].tolist()))
        assert step.verdicts.accepted[n, : int(step.verdicts.num_accepted[n])].tolist() == list(verdict.accepted)
        expected = [*(draft.token_ids[node] for node in verdict.accepted), verdict.token_id]
        assert step.verdicts.tokens[n, : int(step.verdicts.num_tokens[n])].tolist() == expected


@few
@given(random_steps(), st.integers(0, 2**31), st.booleans())
def test_kernels_commit_what_the_formula_commits(step, seed, missing):
    steps.prepare(step.plan, step.table, step.rows, block_size=step.block_size)
    steps.match(step.plan, step.table, step.rows, sampled_tokens(step, seed, missing=missing), step.verdicts)
    table, rules = copy_of(step.table), copy_of(step.rules)
    steps.commit(step.plan, step.table, step.rules, step.verdicts)
    kernels.commit(step.plan, table, rules, step.verdicts)
    assert_equal_records(table, step.table)
    assert_equal_records(rules, step.rules)


@few
@given(random_steps(), st.integers(0, 2**31), st.sampled_from([torch.float32, torch.bfloat16]))
def test_the_accepted_path_is_moved_behind_the_tail(step, seed, dtype):
    steps.prepare(step.plan, step.table, step.rows, block_size=step.block_size)
    steps.match(step.plan, step.table, step.rows, sampled_tokens(step, seed), step.verdicts)
    before = random(2, step.num_kv_slots, 2, 3, dtype=dtype)
    expected, found = before.clone(), before.clone()
    steps.move(step.plan, step.rows, step.verdicts, expected)
    kernels.move(step.plan, step.rows, step.verdicts, found)
    assert torch.equal(found, expected)
    for n, _ in step.running:
        first = int(step.rows.first_rows[n] + step.plan.tails[n])
        for i, node in enumerate(step.verdicts.accepted[n, : int(step.verdicts.num_accepted[n])].tolist()):
            at, wanted = step.rows.kv_slots[first + i], step.rows.kv_slots[first + node]
            assert torch.equal(expected[:, at], before[:, wanted])


def test_a_step_of_padding_writes_nothing():
    table = DeviceTable.empty(2, max_length=8, num_blocks=2, most_drafted=3, device=DEVICE)
    rules = RuleTable.empty(2, 7, device=DEVICE)
    plan = DevicePlan(slots=ints(-1, -1), tails=ints(3, 0), most_drafted=ints(2, 2), ends=ints(1, 1))
    before = copy_of(table)
    for module in (steps, kernels):
        rows, verdicts = StepRows.empty(4, 2, longest_path=3, device=DEVICE), Verdicts.empty(2, 3, device=DEVICE)
        module.prepare(plan, table, rows, block_size=4)
        module.match(plan, table, rows, ints(1, 1, 1, 1), verdicts)
        module.commit(plan, table, rules, verdicts)
        assert rows.slots.tolist() == [-1] * 4
        assert verdicts.num_tokens.tolist() == [0, 0]
        assert_equal_records(table, before)
