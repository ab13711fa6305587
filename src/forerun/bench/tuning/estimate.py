"""How long a tuning will take, said before it begins: bounds from the seconds of a plain step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forerun.bench.profiling.grid import MIXED_ROWS, NUM_WARMUP_ROUNDS, SECONDS_OF_SETUP, ProfileGrid
from forerun.bench.tuning.requests import TuningWorkload
from forerun.bench.tuning.step_times import step_grid
from forerun.bench.tuning.target_rows import NUM_DRAFTED, RECORDED_AT_ONCE
from forerun.plan.tuning.candidates import SearchSpace
from forerun.plan.tuning.screening import NUM_REFINED

SIMULATED_TOKEN_SECONDS = 3e-4
"""Of simulating one token of one run, drafters at work: most take less."""

StepSeconds = Callable[[int, int], float]
"""(rows, sequences) -> seconds of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Seconds of each stage, at most: as if no answer ended early and no draft helped."""

    record: float
    measure_steps: float
    simulate: float
    run: float

    @property
    def total(self) -> float:
        """All stages together."""
        return self.record + self.measure_steps + self.simulate + self.run

    @classmethod
    def of(
        cls,
        workload: TuningWorkload,
        space: SearchSpace,
        step_seconds: StepSeconds,
        *,
        rounds: int,
        num_finalists: int,
    ) -> Estimate:
        """Estimate a tuning.

        Args:
            workload: what is served.
            space: what is tried.
            step_seconds: what a plain step takes on this machine.
            rounds: of real runs, at most.
            num_finalists: candidates in them, auto and plain decoding included; plain decoding once.
        """
        num_tokens = len(workload.prompts) * workload.max_tokens
        num_candidates = len(space.drafting()) + NUM_REFINED * (len(space.limits) - 1) * len(space.quantizations)
        num_formats = len(space.quantizations)
        most = workload.most_running(space.usual.max_num_seqs)
        at_once = min(len(workload.prompts), space.usual.max_num_seqs, RECORDED_AT_ONCE)
        return cls(
            record=num_formats * num_tokens / at_once * step_seconds(at_once * (1 + NUM_DRAFTED), at_once),
            measure_steps=num_formats * _sweep_seconds(step_grid(workload, space.usual.max_num_seqs), step_seconds),
            simulate=num_candidates * num_tokens * SIMULATED_TOKEN_SECONDS,
            run=(1 + (num_finalists - 1) * rounds) * _run_seconds(workload, step_seconds, most),
        )


def _run_seconds(workload: TuningWorkload, step_seconds: StepSeconds, most: int) -> float:
    """One real run without drafts: as long as requests arrive, or as the engine needs for them if that is longer."""
    num_tokens = len(workload.prompts) * workload.max_tokens
    busy = num_tokens / most * step_seconds(most, most)
    if workload.load.rate is None:
        return busy
    arriving = len(workload.prompts) / workload.load.rate
    return max(arriving, busy) + workload.max_tokens * step_seconds(1, 1)


def _sweep_seconds(grid: ProfileGrid, step_seconds: StepSeconds) -> float:
    """All rounds of the sweep of step times, and the one that warms up; a prompt's token counts as a row."""
    prompts = sum(step_seconds(length, 1) for length in grid.input_lengths)
    batches = sum(
        SECONDS_OF_SETUP
        + step_seconds(MIXED_ROWS[-1], cell.num_sequences)
        + sum(
            grid.steps * step_seconds(cell.num_sequences * (1 + length), cell.num_sequences)
            for length in grid.lengths_for(cell.num_sequences)
        )
        for cell in grid.cells()
    )
    return (NUM_WARMUP_ROUNDS + grid.rounds) * (prompts + batches)
