"""Random sequences, drafts and plans for tests of the device's step: ragged, chains and trees, with padding between."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import strategies as st

from forerun.ops.cuda.table import DevicePlan, DeviceTable, RuleTable, StepRows, Verdicts
from tests.cuda import DEVICE, ints

VOCAB_SIZE = 5  # few tokens, so that drafts are right now and then
MOST_DRAFTED = 6
NUM_SLOTS = 5


@dataclasses.dataclass
class DeviceStep:
    """A table, a plan for it, and empty outputs."""

    table: DeviceTable
    rules: RuleTable
    plan: DevicePlan
    rows: StepRows
    verdicts: Verdicts
    block_size: int
    num_kv_slots: int
    trees: list[tuple[int, ...]]  # parents of each planned sequence's nodes in this step

    @property
    def running(self):
        """(place in the plan, slot) of the sequences whose texts have not ended."""
        slots = self.plan.slots.tolist()
        return [(n, slot) for n, slot in enumerate(slots) if slot >= 0 and not self.table.ended[slot]]


@st.composite
def steps(draw, *, max_length=40, most_tail=9):
    """A step over 1 to 4 planned sequences."""
    block_size = draw(st.sampled_from([1, 4, 16]))
    num_planned = draw(st.integers(1, 4))
    slots = draw(st.permutations(range(NUM_SLOTS)))[:num_planned]
    slots = [draw(st.sampled_from([slot, slot, slot, -1])) for slot in slots]
    num_blocks = -(-max_length // block_size)
    table = DeviceTable.empty(
        NUM_SLOTS, max_length=max_length, num_blocks=num_blocks, most_drafted=MOST_DRAFTED, device=DEVICE
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    blocks = torch.randperm(NUM_SLOTS * num_blocks, generator=generator).view(NUM_SLOTS, num_blocks)
    table.block_table.copy_(blocks)
    table.tokens.copy_(torch.randint(VOCAB_SIZE, table.tokens.shape, generator=generator))
    rules = RuleTable.empty(NUM_SLOTS, VOCAB_SIZE, device=DEVICE)
    tails, most_drafted, ends, trees = [], [], [], []
    num_needed = 0
    for slot in slots:
        tail, reaches_end = draw(st.integers(1, most_tail)), draw(st.integers(0, 1))
        has_ended = draw(st.sampled_from([0, 0, 0, 1]))
        start = draw(st.integers(0, 15))
        parents = [
            draw(st.one_of(st.just(node - 1), st.integers(-1, node - 1)))
            for node in range(draw(st.integers(0, MOST_DRAFTED)))
        ]
        tails.append(tail)
        most_drafted.append(draw(st.integers(0, MOST_DRAFTED)))
        ends.append(reaches_end)
        trees.append(tuple(parents[: most_drafted[-1]]) if reaches_end and slot >= 0 and not has_ended else ())
        if slot >= 0:
            num_needed += 0 if has_ended else tail + len(trees[-1])
            table.ended[slot] = has_ended
            rules.stop_ids[slot, 0] = draw(st.integers(-1, VOCAB_SIZE - 1))
            rules.min_length[slot] = start + tail + draw(st.integers(-2, 3))
            rules.max_length[slot] = start + tail + draw(st.sampled_from([1, 2, 4, 100]))
            table.computed[slot] = start
            table.lengths[slot] = start + tail + (0 if reaches_end else 3)
            table.draft_sizes[slot] = len(parents)
            table.draft_parents[slot, : len(parents)] = ints(*parents)
            drafted = torch.randint(VOCAB_SIZE, (len(parents),), generator=generator)
            table.draft_tokens[slot, : len(parents)] = drafted.to(DEVICE, torch.int32)
    num_rows = max(1, num_needed) + draw(st.integers(0, 3))
    return DeviceStep(
        table=table,
        rules=rules,
        plan=DevicePlan(slots=ints(*slots), tails=ints(*tails), most_drafted=ints(*most_drafted), ends=ints(*ends)),
        rows=StepRows.empty(num_rows, num_planned, longest_path=MOST_DRAFTED, device=DEVICE),
        verdicts=Verdicts.empty(num_planned, MOST_DRAFTED, device=DEVICE),
        block_size=block_size,
        num_kv_slots=NUM_SLOTS * num_blocks * block_size,
        trees=trees,
    )


def sampled_tokens(step, seed, *, missing=False):
    """A target's token after each row; where `missing`, some could not be drawn."""
    generator = torch.Generator().manual_seed(seed)
    lowest = -1 if missing else 0
    return torch.randint(lowest, VOCAB_SIZE, step.rows.slots.shape, generator=generator).to(DEVICE, torch.int32)
