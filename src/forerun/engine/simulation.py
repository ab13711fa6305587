"""An engine in virtual time: real scheduling, KV accounting and statistics over an executor that computes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from forerun.core.step import StepPlan
from forerun.engine.engine import Engine, EngineParts
from forerun.engine.request import RequestProcessor
from forerun.engine.scheduler import Scheduler, SchedulerLimits
from forerun.engine.speculation import FixedLength, Schedule
from forerun.executor.simulated import Acceptance, SimulatedExecutor, VirtualClock
from forerun.kv.block_pool import BlockPool


def linear_step_seconds(plan: StepPlan) -> float:
    """4 ms, and 0.1 ms for each row: a small model on a processor."""
    return 0.004 + 0.0001 * len(plan.rows.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """What is simulated, in the names of `EngineSettings` where it has the setting.

    `step_seconds` says what a step takes. `acceptance` is how good drafts of at most
    `num_speculative_tokens` are; None: nothing is drafted.
    """

    step_seconds: Callable[[StepPlan], float] = linear_step_seconds
    acceptance: Acceptance | None = None
    num_speculative_tokens: int = 0
    schedule: Schedule = ()
    vocab_size: int = 32_000
    eos_token_ids: frozenset[int] = frozenset()
    num_blocks: int = 4096
    block_size: int = 16
    max_model_len: int = 4096
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    seed: int = 0


def simulated_engine(settings: SimulationSettings, *, delay: int = 0) -> Engine:
    """Make an engine whose steps take virtual time only; see `Engine` for `delay`."""
    clock = VirtualClock()
    executor = SimulatedExecutor(
        vocab_size=settings.vocab_size,
        step_seconds=settings.step_seconds,
        clock=clock,
        acceptance=settings.acceptance,
    )
    pool = BlockPool(settings.num_blocks, enable_prefix_caching=settings.enable_prefix_caching)
    limits = SchedulerLimits(max_num_seqs=settings.max_num_seqs, max_num_batched_tokens=settings.max_num_batched_tokens)
    parts = EngineParts(
        processor=RequestProcessor(
            tokenizer=None,
            executor=executor,
            vocab_size=settings.vocab_size,
            max_model_len=settings.max_model_len,
            eos_token_ids=settings.eos_token_ids,
            pool=pool,
            block_size=settings.block_size,
            random_source=random.Random(settings.seed),
        ),
        pool=pool,
        scheduler=Scheduler(pool, limits, block_size=settings.block_size),
        executor=executor,
        control=FixedLength(num_speculative_tokens=settings.num_speculative_tokens, schedule=settings.schedule),
        block_size=settings.block_size,
    )
    return Engine(parts, delay=delay, clock=clock)
