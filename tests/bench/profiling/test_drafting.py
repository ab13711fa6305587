"""What drafting costs: all that a step takes beyond its rows, with memory as fast as in the plain steps beside it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from forerun.bench.profiling.drafting import measure_drafting_cost
from forerun.bench.profiling.filling import FillingDrafter
from forerun.bench.recording import RecordedText
from forerun.core.draft import NO_DRAFT, Draft
from forerun.drafters.base import DraftContext, TargetInfo
from forerun.plan.step_times import DraftingCost, StepTimeModel
from tests.bench.profiling.tiny import NGRAM, settings
from tests.engines import tiny_target
from tests.plan.profiles import WEIGHTS

STEP_SECONDS = 0.01
FLAT = StepTimeModel([STEP_SECONDS, *[0.0] * (len(WEIGHTS) - 1)])
"""Steps that take as long whatever is in them: all of it to read weights."""


class Machine:
    """Its clock goes on by a step's time whenever it is read a second time, and by what a drafter takes."""

    def __init__(self, slowness: float = 1.0) -> None:
        self.slowness = slowness
        self.now = 0.0
        self.num_reads = 0

    def clock(self) -> float:
        self.num_reads += 1
        if self.num_reads % 2 == 0:  # a step's end
            self.now += STEP_SECONDS * self.slowness
        return self.now


def slow_drafter(machine: Machine, *, per_call: float, per_sequence: float) -> type[FillingDrafter]:
    """A drafter that takes so many seconds."""

    class SlowDrafter(FillingDrafter):
        def __init__(self, target: TargetInfo) -> None:
            super().__init__(target)

        def propose(self, context: DraftContext) -> list[Draft]:
            machine.now += per_call + per_sequence * len(context.requests)
            return super().propose(context)

    return SlowDrafter


def texts(count: int = 16) -> list[RecordedText]:
    """Prompts of two kinds."""
    source = np.random.default_rng(0)
    return [
        RecordedText(
            kind=("a", "b")[number % 2],
            temperature=0.0,
            prompt_ids=source.integers(1, 60, size=8).tolist(),
            answer_ids=[1, 2, 3],
            candidate_ids=np.zeros((3, 2), dtype=np.int32),
            candidate_logprobs=np.zeros((3, 2), dtype=np.float32),
        )
        for number in range(count)
    ]


def cost_of(machine: Machine, drafter: object) -> DraftingCost:
    config = {"method": drafter, "num_speculative_tokens": 2}
    return measure_drafting_cost("slow", tiny_target(), settings(), config, texts(), FLAT, clock=machine.clock)


@pytest.mark.parametrize("slowness", [1.0, 3.0])
def test_a_cost_is_what_steps_take_longer_than_without_drafts_however_fast_memory_is(slowness: float) -> None:
    machine = Machine(slowness)
    cost = cost_of(machine, slow_drafter(machine, per_call=0.002, per_sequence=0.001))
    assert cost.seconds(1, 2) == pytest.approx(0.003, rel=0.05)
    assert cost.seconds(3, 6) == pytest.approx(0.005, rel=0.05)


def test_what_few_steps_draft_counts_however_long_it_takes() -> None:
    machine, calls = Machine(), 0

    class DraftsSeldom(FillingDrafter):
        def propose(self, context: DraftContext) -> list[Draft]:
            nonlocal calls
            calls += 1
            if calls % 3:
                return [NO_DRAFT] * len(context.requests)
            drafts = super().propose(context)
            machine.now += 0.02 * sum(len(draft.token_ids) for draft in drafts)  # four times as long as a step, or more
            return drafts

    cost = cost_of(machine, DraftsSeldom)
    assert cost.seconds(1, 2) == pytest.approx(0.04, rel=0.05)
    assert cost.seconds(1, 0) == pytest.approx(0.0, abs=0.002)


def test_batches_are_full_where_there_are_fewer_texts_than_sequences() -> None:
    machine = Machine()
    sizes: set[int] = set()

    class Counted(FillingDrafter):
        def propose(self, context: DraftContext) -> list[Draft]:
            sizes.add(len(context.requests))
            return super().propose(context)

    config, larger = {"method": Counted, "num_speculative_tokens": 2}, replace(settings(), max_num_seqs=16)
    measure_drafting_cost("full", tiny_target(), larger, config, texts(6), FLAT, clock=machine.clock)
    assert sizes >= {1, 4, 16}


def test_a_drafter_that_finds_nothing_costs_nothing() -> None:
    machine = Machine()
    config = NGRAM | {"prompt_lookup_min": 8, "prompt_lookup_max": 8}
    cost = measure_drafting_cost("none", tiny_target(), settings(), config, texts(), FLAT, clock=machine.clock)
    assert cost.seconds(4, 0) == pytest.approx(0.0, abs=1e-9)
