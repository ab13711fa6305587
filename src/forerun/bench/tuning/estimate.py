"""How long a tuning will take, said before it begins: bounds from the seconds of a plain step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forerun.bench.tuning.requests import TuningWorkload
from forerun.bench.tuning.step_samples import DRAFT_LENGTHS, MOST_ROWS, NUM_ROUNDS, NUM_STEPS, batch_sizes
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
        rows_each = 1 + sum(DRAFT_LENGTHS) / len(DRAFT_LENGTHS)
        steps = sum(
            NUM_STEPS * step_seconds(min(MOST_ROWS, round(size * rows_each)), size) for size in batch_sizes(most)
        )
        at_once = min(len(workload.prompts), space.usual.max_num_seqs, RECORDED_AT_ONCE)
        return cls(
            record=num_formats * num_tokens / at_once * step_seconds(at_once * (1 + NUM_DRAFTED), at_once),
            measure_steps=num_formats * (NUM_ROUNDS + 1) * steps,
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
