"""The choice of K against worlds in which the best is known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.engine.speculation import FixedLength
from forerun.errors import ConfigError
from forerun.plan.acceptance import AcceptanceProfile
from forerun.plan.draft_lengths import (
    MIN_GAIN,
    Speculation,
    StepTable,
    as_schedule,
    best_lengths,
    chain_yields,
    fixed_lengths,
    steady_lengths,
    step_table,
)
from forerun.plan.step_times import DraftingCost
from tests.plan.worlds import LinearStepTimes, speculation

rates = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8).map(tuple)
costs = st.builds(
    LinearStepTimes, base=st.floats(1e-4, 0.1), per_row=st.floats(1e-6, 0.01), per_context_token=st.floats(0, 1e-6)
)


def marginal_rule(step_times: LinearStepTimes, conditional: tuple[float, ...], batch_size: int, context: float) -> int:
    """Draft one more while its chance to be accepted is worth what it costs: right where costs are linear."""
    length, chance, expected = 0, 1.0, 1.0
    for rate in conditional:
        chance *= rate
        seconds = step_times.seconds(
            num_rows=batch_size * (length + 1),
            num_sequences=batch_size,
            num_context_tokens=round(batch_size * context),
        )
        if chance / expected <= batch_size * step_times.per_row / seconds:
            break
        length, expected = length + 1, expected + chance
    return length


@given(costs, rates, st.integers(1, 32))
def test_enumeration_is_the_marginal_rule_where_rows_cost_alike(
    times: LinearStepTimes, conditional: tuple[float, ...], batch_size: int
) -> None:
    table = step_table(times, speculation(*conditional), max_batch_size=batch_size, context=100.0)
    chosen = int(best_lengths(table)[-1])
    expected = marginal_rule(times, conditional, batch_size, 100.0)
    per_token = table.seconds_per_token[-1]
    assert per_token[chosen] == pytest.approx(per_token[expected], rel=1e-9)


@given(costs, rates)
def test_a_better_drafter_never_makes_tokens_dearer(times: LinearStepTimes, conditional: tuple[float, ...]) -> None:
    better = tuple(rate + (1.0 - rate) * 0.3 for rate in conditional)
    least = [
        step_table(times, speculation(*some), max_batch_size=8, context=50.0).seconds_per_token.min(axis=1)
        for some in (conditional, better)
    ]
    assert np.all(least[1] <= least[0] * (1.0 + 1e-12))


def test_a_drafter_that_is_never_right_is_not_used() -> None:
    table = step_table(LinearStepTimes(), speculation(0.0, 0.0), max_batch_size=4, context=0.0)
    assert best_lengths(table).tolist() == [0, 0, 0, 0]


def test_drafting_costs_time_even_where_rows_are_free() -> None:
    times = LinearStepTimes(per_row=0.0)
    free = step_table(times, speculation(0.6, 0.6, 0.6), max_batch_size=2, context=0.0)
    assert best_lengths(free).tolist() == [3, 3]
    dear = step_table(times, speculation(0.6, 0.6, 0.6, per_token=0.001), max_batch_size=2, context=0.0)
    assert dear.seconds[1].tolist() == pytest.approx([0.004, 0.006, 0.008, 0.010])
    assert best_lengths(dear).tolist() == [2, 1]  # 6 ms for 1.96 tokens; of two sequences 6 ms for 1.6


def test_a_step_in_the_costs_is_jumped_over() -> None:
    """The first drafted token does not pay, three do: a rule that stops at the first loss would draft none."""
    seconds = np.array([[1.0, 1.9, 1.9, 1.9]])
    table = StepTable(seconds=seconds, expected=np.array([1.0, 1.8, 2.5, 3.0]), variance=np.zeros(4))
    assert best_lengths(table).tolist() == [3]


@given(
    st.lists(st.lists(st.floats(0.1, 10.0), min_size=4, max_size=4), min_size=1, max_size=20),
    st.floats(0.0, 0.5),
)
def test_a_steady_schedule_loses_at_most_what_a_change_must_gain(seconds: list[list[float]], gain: float) -> None:
    table = StepTable(seconds=np.array(seconds), expected=np.array([1.0, 1.8, 2.2, 2.5]), variance=np.zeros(4))
    lengths = steady_lengths(table, min_gain=gain)
    rows = np.arange(len(lengths))
    chosen, least = table.seconds_per_token[rows, lengths], table.seconds_per_token.min(axis=1)
    assert np.all((1.0 - gain) * chosen <= least * (1.0 + 1e-9))
    changes = np.flatnonzero(np.diff(lengths)) + 1
    for at in changes:
        assert table.seconds_per_token[at, lengths[at]] <= (1.0 - gain) * table.seconds_per_token[at, lengths[at - 1]]


@given(st.lists(st.integers(0, 8), min_size=1, max_size=40))
def test_a_schedule_is_read_by_the_engine_as_it_was_planned(lengths: list[int]) -> None:
    schedule = as_schedule(np.array(lengths))
    assert schedule[0][0] == 1
    assert schedule[-1][1] == len(lengths)
    control = FixedLength(num_speculative_tokens=8, schedule=schedule)
    assert [control.draft_limit(size) for size in range(1, len(lengths) + 1)] == lengths


def test_one_length_is_one_entry() -> None:
    assert as_schedule(fixed_lengths(16, 3)) == ((1, 16, 3),)
    assert MIN_GAIN == 0.03


def test_drafts_deeper_than_measured_are_refused() -> None:
    acceptance = AcceptanceProfile(method="suffix", conditional=(0.5, 0.5))
    with pytest.raises(ConfigError, match="must be from 0 to 2, the places that are known: profile longer drafts"):
        chain_yields(acceptance, 3)


def test_rows_are_those_that_a_look_up_finds() -> None:
    """A drafter that finds a draft every other time has half of the rows, at half the cost of drafting them."""
    acceptance = AcceptanceProfile(method="suffix", conditional=(0.4, 0.8), proposed=(0.5, 0.5))
    cost = DraftingCost(seconds_per_draft_token=0.001)
    found = Speculation(name="suffix", acceptance=acceptance, yields=chain_yields(acceptance, 2), cost=cost)
    table = step_table(LinearStepTimes(base=0.01, per_row=0.001), found, max_batch_size=2, context=0.0)
    assert table.seconds[1].tolist() == pytest.approx([0.012, 0.013 + 0.001, 0.014 + 0.002])
    assert table.expected.tolist() == pytest.approx([1.0, 1.4, 1.72])
