"""Step times of a tuning: the grid follows the workload, and the sweep runs on it."""

from __future__ import annotations

import pytest

from forerun.bench import instruments
from forerun.bench.tuning import step_times
from forerun.bench.tuning.step_times import measure_step_times, step_grid
from forerun.plan.tuning.offered_load import OfferedLoad
from tests.bench.tuning.workloads import LIMITS, SETTINGS, workload
from tests.engines import tiny_target


@pytest.mark.parametrize(("clients", "sizes"), [(1, (1, 2)), (3, (1, 2, 3)), (64, (1, 2, 4, 6))])
def test_as_many_sequences_are_measured_as_prompts_and_load_can_bring(clients, sizes):
    assert step_grid(workload(load=OfferedLoad(concurrency=clients)), 64).num_sequences == sizes


def test_prompts_and_contexts_are_the_workloads():
    grid = step_grid(workload(), 4)
    assert grid.input_lengths == (3, 9, 12)
    assert max(grid.contexts) == 12 + 24


def test_prompts_of_one_length_give_a_curve_too():
    assert step_grid(workload(prompts=[[1, 2, 3]]), 4).input_lengths == (3, 6, 12)


def test_steps_are_measured_and_fitted(monkeypatch):
    monkeypatch.setitem(instruments.BUFFER_BYTES, "cpu", 1 << 16)
    monkeypatch.setattr(step_times, "NUM_STEPS", 1)
    said = []
    found = measure_step_times(tiny_target(), SETTINGS, workload(), LIMITS, said.append)
    assert found.measured.rows >= 17
    assert found.measured.sequences == 2
    assert found.measured.prompt_rows >= 12
    assert found.seconds(num_rows=4, num_sequences=1, num_context_tokens=20) > 0
    assert any(line.startswith("step times, round 1") for line in said)


@pytest.mark.parametrize(("length", "lengths"), [(200, (100, 200, 400)), (300, (75, 150, 300)), (480, (120, 240, 480))])
def test_no_more_tokens_are_measured_than_the_model_allows(length, lengths):
    grid = step_grid(workload(prompts=[[7] * length]), 4, max_model_len=512)
    assert grid.input_lengths == lengths
    assert max(grid.contexts) + grid.tokens_beyond_context <= 512
    assert len(set(grid.contexts)) == 2


def test_steps_of_texts_as_long_as_the_model_allows_are_measured(monkeypatch):
    monkeypatch.setitem(instruments.BUFFER_BYTES, "cpu", 1 << 16)
    monkeypatch.setattr(step_times, "NUM_STEPS", 1)
    monkeypatch.setattr(step_times, "DRAFT_LENGTHS", (0, 4))
    target = tiny_target()
    longest = target.model.max_model_len - 24
    found = measure_step_times(target, SETTINGS, workload(prompts=[[7] * longest]), LIMITS, lambda _: None)
    assert found.measured.prompt_rows == LIMITS.max_num_batched_tokens
    assert found.measured.context_tokens > 400
