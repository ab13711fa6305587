"""What a step costs, learnt from step times."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from forerun.engine.costs import KNOWN_FOR, MATRIX_PRIOR, NUM_FIRST_STEPS, NUM_TRIALS, PRIOR, SEQUENCE, StepCosts

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 64, 128)
FLAT = (1.0, 1.01, 1.04, 1.14, 1.28, 1.5, 2.15, 2.9, 5.6, 11.0)
STEEP = tuple(1 + 0.25 * (rows - 1) for rows in ROWS)


def run(costs, curve, *, num_steps, seconds=0.005, noise=0.1, seed=0, sequences=(1,)):
    """Steps of one to 17 rows for each sequence, whose times are `curve`'s with noise."""
    rng = random.Random(seed)
    for _ in range(num_steps):
        num_sequences = rng.choice(sequences)
        num_rows = num_sequences * (1 + rng.choice([0, 2, 4, 7, 11, 16]))
        cost = np.interp(num_rows, ROWS, curve) + 0.0002 * 200 * num_sequences
        costs.observe(
            num_rows=num_rows,
            num_sequences=num_sequences,
            num_context_tokens=200 * num_sequences,
            seconds=seconds * cost * rng.lognormvariate(0, noise),
        )


def ratios(costs, rows=(4, 8, 16)):
    """Costs of a sequence's step of many rows, in those of one row."""
    beside = costs.beside_rows(1, 200)
    return [(costs.of_rows(n) + beside) / (costs.of_rows(1) + beside) for n in rows]


@pytest.mark.parametrize("curve", [FLAT, STEEP])
def test_the_costs_of_a_machine_are_found_in_a_few_hundred_noisy_steps(curve):
    costs = StepCosts()
    run(costs, curve, num_steps=400)
    expected = [(np.interp(n, ROWS, curve) + 0.04) / 1.04 for n in (4, 8, 16)]
    assert ratios(costs) == pytest.approx(expected, rel=0.1)
    assert costs.unit * (costs.of_rows(1) + costs.beside_rows(1, 200)) == pytest.approx(0.0052, rel=0.15)


def test_the_jump_of_matrix_registers_is_found_where_both_sides_of_it_are_seen():
    costs, rng = StepCosts(MATRIX_PRIOR), random.Random(0)
    for _ in range(400):
        num_rows = rng.choice([1, 4, 9, 14, 16, 17, 18, 24])
        cost = 1 + 0.01 * num_rows + 0.2 * (num_rows > 16)
        costs.observe(
            num_rows=num_rows,
            num_sequences=1,
            num_context_tokens=200,
            seconds=0.01 * cost * rng.lognormvariate(0, 0.05),
        )
    jump, before, after = (costs.of_rows(n + 1) - costs.of_rows(n) for n in (16, 15, 17))
    assert jump == pytest.approx(0.2, abs=0.06)
    assert max(before, after) < 0.05


def test_a_change_of_the_machines_speed_changes_the_unit_and_not_the_curve():
    costs = StepCosts()
    run(costs, FLAT, num_steps=400)
    before, unit = ratios(costs), costs.unit
    run(costs, FLAT, num_steps=200, seconds=0.01)
    assert costs.unit == pytest.approx(2 * unit, rel=0.15)
    assert ratios(costs) == pytest.approx(before, rel=0.06)


def test_a_fit_is_where_the_next_engine_begins():
    costs = StepCosts()
    run(costs, STEEP, num_steps=600)
    again = StepCosts(costs.weights)
    assert ratios(again) == pytest.approx(ratios(costs))
    assert again.of_rows(1) + again.beside_rows(1, 0) == pytest.approx(1.0)
    run(again, STEEP, num_steps=100)
    assert ratios(again) == pytest.approx(ratios(costs), rel=0.1)


@pytest.mark.parametrize(("num_sequences", "seed"), [(4, 7), (8, 4), (16, 6), (16, 7)])
def test_a_speed_that_swings_leads_to_no_wasted_rows(num_sequences, seed):
    """A trial that met a quick moment would make rows seem free for ever, were times compared with their mean."""
    costs, rng, speed = StepCosts(), random.Random(seed), 1.0
    counts = range(num_sequences, 25 * num_sequences, max(1, num_sequences // 8))
    beside = costs.beside_rows

    def tokens(num_rows):  # each further row brings less
        return num_sequences * (3 - 2 * math.exp(-(num_rows - num_sequences) / (2 * num_sequences)))

    def cost(num_rows):
        return float(np.interp(num_rows, (*ROWS, 1024), (*FLAT, 88.0)))

    written = taken = 0.0
    for step in range(400):
        speed = rng.choice([1.0, 1.8]) if rng.random() < 0.1 else speed
        num_rows = max(counts, key=lambda n: tokens(n) / (costs.of_rows(n) + beside(num_sequences, 0)))
        num_rows += num_sequences // 2 * (step % 16 == 15)  # a trial
        seconds = 0.005 * speed * cost(num_rows) * rng.lognormvariate(0, 0.1)
        costs.observe(num_rows=num_rows, num_sequences=num_sequences, num_context_tokens=0, seconds=seconds)
        written, taken = written + tokens(num_rows), taken + cost(num_rows)
    assert written / taken > 0.85 * max(tokens(n) / cost(n) for n in counts)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 1e6, 1e-9])
def test_a_clock_that_jumps_spoils_nothing(seconds):
    costs = StepCosts()
    run(costs, FLAT, num_steps=300)
    before, unit = ratios(costs), costs.unit
    for _ in range(3):
        costs.observe(num_rows=5, num_sequences=1, num_context_tokens=200, seconds=seconds)
    run(costs, FLAT, num_steps=64, seed=1)
    assert ratios(costs) == pytest.approx(before, rel=0.06)
    assert costs.unit == pytest.approx(unit, rel=0.15)


def test_more_rows_never_cost_less_and_go_on_beyond_the_table():
    costs = StepCosts()
    run(costs, FLAT, num_steps=200, noise=0.6)
    curve = [costs.of_rows(n) for n in range(0, 5000, 7)]
    assert all(0 < before <= after for before, after in zip(curve, curve[1:], strict=False))
    assert costs.of_rows(5000) > costs.of_rows(1000)


@pytest.mark.parametrize(
    "weights", [PRIOR[:-1], (*PRIOR, 1.0), *((*PRIOR[:-1], wrong) for wrong in (math.nan, math.inf, 1e308, -0.1))]
)
def test_impossible_weights_are_refused(weights):
    with pytest.raises(ValueError, match="11 numbers from 0 to 1000"):
        StepCosts(weights)


def test_what_cannot_save_time_leaves_its_place_to_the_others():
    costs, rng = StepCosts(), random.Random(0)
    steps = [(n * rows, n) for n in (1, 2, 4, 8, 12, 16) for rows in (1, 2, 3)]

    def seconds(num_rows, num_sequences):  # sequences seem to save time, as their rows cost less the more there are
        return 0.01 * (1 + 0.2 * num_rows - 0.1 * num_sequences)

    for _ in range(600):
        num_rows, num_sequences = rng.choice(steps)
        taken = seconds(num_rows, num_sequences)
        costs.observe(num_rows=num_rows, num_sequences=num_sequences, num_context_tokens=0, seconds=taken)
    assert costs.weights[SEQUENCE] == 0.0
    for num_rows, num_sequences in ((16, 16), (12, 12), (24, 8)):
        found = costs.unit * (costs.of_rows(num_rows) + costs.beside_rows(num_sequences, 0))
        assert found == pytest.approx(seconds(num_rows, num_sequences), rel=0.3)


def test_what_a_kind_of_step_costs_is_known_for_a_while():
    costs = StepCosts()

    def observe(num_rows, num_steps):
        for _ in range(num_steps):
            costs.observe(num_rows=num_rows, num_sequences=1, num_context_tokens=0, seconds=0.01)

    observe(1, NUM_FIRST_STEPS + NUM_TRIALS - 1)
    assert not costs.knows(1, 1)
    observe(1, 1)
    assert costs.knows(1, 1)
    assert not costs.knows(4, 1)
    observe(4, KNOWN_FOR - 1)
    assert costs.knows(1, 1)
    observe(4, 1)
    assert not costs.knows(1, 1)
