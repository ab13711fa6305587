"""Sweeps: each cell is measured with each draft length, its steps are counted as a simulation counts them, memory is given back."""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.bench.energy import Counter, EnergyMeter
from forerun.bench.instruments import BandwidthProbe, Stopwatch
from forerun.bench.profiling.filling import filling_config
from forerun.bench.profiling.step_sweep import (
    DECODE,
    MIXED,
    PREFILL,
    MeasuredStep,
    RoundResult,
    StepSweep,
    level_rounds,
    step_sweep,
    write_sweep,
)
from forerun.config.speculative_config import resolve_speculative
from forerun.llm import LLM
from forerun.plan.step_times import StepSample
from tests.bench.profiling.tiny import GRID, settings
from tests.engines import tiny_target


@pytest.fixture(scope="module")
def engine() -> LLM:
    return LLM.from_target(tiny_target(), settings(), resolve_speculative(filling_config(GRID.longest_draft)))


@pytest.fixture
def sweep(engine: LLM) -> Iterator[StepSweep]:
    probe = BandwidthProbe(Stopwatch(engine.device), num_bytes=1 << 16)
    with step_sweep(engine, GRID, probe, EnergyMeter([])) as found:
        yield found


def test_a_round_measures_each_batch_with_each_draft_length_and_each_prompt(sweep: StepSweep) -> None:
    result = sweep.run_round(0)
    found = {
        (step.num_sequences, step.context, step.sample.num_draft_tokens // step.num_sequences)
        for step in result.steps
        if step.sweep == DECODE
    }
    assert found == {(n, context, k) for n in (1, 3) for context in (8, 24) for k in (0, 2)}
    assert sorted(prompt.isl for prompt in result.prompts) == [4, 8, 16]
    assert {step.sweep for step in result.steps} == {PREFILL, DECODE, MIXED}


def test_steps_are_counted_by_their_rows(sweep: StepSweep) -> None:
    for step in sweep.run_round(1).steps:
        sample = step.sample
        if step.sweep == PREFILL:
            assert (sample.num_rows, sample.num_prompt_rows, sample.num_prompt_context) == (0, step.context, 0)
        else:
            assert sample.num_sequences == step.num_sequences
            assert sample.num_rows == sample.num_sequences + sample.num_draft_tokens
            least = step.num_sequences * (step.context - 1)
            assert least <= sample.num_context_tokens <= least + step.num_sequences * 40
        assert (step.sweep == MIXED) == (sample.num_prompt_rows > 0 and sample.num_rows > 0)


def test_contexts_are_found_in_the_prefix_cache(sweep: StepSweep, engine: LLM) -> None:
    scheduler = engine.engine.parts.scheduler
    before = scheduler.num_cached_tokens
    sweep.run_round(2)
    # of 24 tokens five blocks of 4 come before the last token, of 8 one
    assert scheduler.num_cached_tokens - before >= (1 + 3) * (20 + 4)


def test_all_memory_is_given_back(engine: LLM) -> None:
    probe = BandwidthProbe(Stopwatch(engine.device), num_bytes=1 << 16)
    with step_sweep(engine, GRID, probe, EnergyMeter([])) as found:
        found.run_round(0)
    pool = engine.engine.parts.pool
    assert pool.num_free == pool.num_blocks
    pool.check_integrity([])


def test_a_round_comes_back_from_json_and_every_step_is_a_row_of_the_table(sweep: StepSweep, tmp_path: Path) -> None:
    result = sweep.run_round(0)
    assert RoundResult.from_json(result.to_json()) == result
    write_sweep(tmp_path / "sweep.csv", result.steps)
    with (tmp_path / "sweep.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(result.steps)
    assert float(rows[0]["seconds"]) == result.steps[0].sample.seconds


def test_energy_is_shared_out_by_time_where_there_is_a_counter(engine: LLM) -> None:
    start = time.perf_counter()
    meter = EnergyMeter([Counter("cpu", "fake", "rapl", lambda: 50.0 * (time.perf_counter() - start))])  # 50 W
    meter.rest(0.001)
    probe = BandwidthProbe(Stopwatch(engine.device), num_bytes=1 << 16)
    with step_sweep(engine, GRID, probe, meter) as found:
        result = found.run_round(0)
    assert result.watts == pytest.approx(50.0, rel=0.2)
    assert result.idle_watts is not None
    for step in result.steps:
        assert step.sample.energy_joules == pytest.approx(result.watts * step.sample.seconds)


def test_without_a_counter_energy_is_not_known(sweep: StepSweep) -> None:
    result = sweep.run_round(0)
    assert result.watts is None
    assert {step.sample.energy_joules for step in result.steps} == {None}


def test_a_round_on_a_slowed_machine_counts_as_the_others() -> None:
    steps = [
        MeasuredStep(
            sweep=DECODE,
            round=0,
            gigabytes_per_second=None,
            num_sequences=count,
            context=8,
            sample=StepSample(num_rows=count, num_sequences=count, num_context_tokens=8, seconds=0.01 * count),
        )
        for count in (1, 2, 3)
    ]
    slowed = [replace(step, sample=replace(step.sample, seconds=3 * step.sample.seconds)) for step in steps]
    usual, slow = (
        RoundResult(gigabytes_per_second=None, steps=steps),
        RoundResult(gigabytes_per_second=None, steps=slowed),
    )
    levelled = level_rounds([usual, slow, usual])
    assert [one.seconds for one in levelled] == pytest.approx([0.01, 0.02, 0.03] * 3)
