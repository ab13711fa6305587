"""An engine in virtual time: real scheduling, KV accounting and statistics over an executor that computes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from forerun.core.step import StepPlan
from forerun.engine.engine import Engine, EngineParts
from forerun.engine.request import RequestProcessor
from forerun.engine.scheduler import Scheduler, SchedulerLimits
from forerun.engine.speculation import FixedLength, SpeculationControl
from forerun.executor.simulated import DraftSeconds, SimulatedExecutor, VirtualClock, drafting_is_free
from forerun.executor.simulated_text import Drafting, Texts
from forerun.kv.block_pool import BlockPool

NO_SPECULATION = FixedLength(num_speculative_tokens=0)


def linear_step_seconds(plan: StepPlan) -> float:
    """4 ms, and 0.1 ms for each row: a small model on a processor."""
    return 0.004 + 0.0001 * len(plan.rows.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """What is simulated, in the names of `EngineSettings` where it has the setting.

    `step_seconds` says what a step takes, drafting left out, and `draft_seconds` what that takes.
    `drafting` says what is drafted and what of it is right (None: nothing is drafted), `texts` what the
    target writes (None: tokens from a hash).
    """

    step_seconds: Callable[[StepPlan], float] = linear_step_seconds
    draft_seconds: DraftSeconds = drafting_is_free
    drafting: Drafting | None = None
    texts: Texts | None = None
    vocab_size: int = 32_000
    eos_token_ids: frozenset[int] = frozenset()
    num_blocks: int = 4096
    block_size: int = 16
    max_model_len: int = 4096
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    seed: int = 0


def simulated_engine(
    settings: SimulationSettings,
    control: SpeculationControl = NO_SPECULATION,
    *,
    delay: int = 0,
    clock: VirtualClock | None = None,
) -> Engine:
    """Make an engine whose steps take virtual time only.

    Args:
        settings: what is simulated.
        control: says how much is drafted and verified; one that learns belongs to one engine.
        delay: see `Engine`.
        clock: its time; None: a clock of its own that begins at 0.
    """
    clock = VirtualClock() if clock is None else clock
    executor = SimulatedExecutor(
        vocab_size=settings.vocab_size,
        step_seconds=settings.step_seconds,
        clock=clock,
        drafting=settings.drafting,
        draft_seconds=settings.draft_seconds,
        texts=settings.texts,
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
        control=control,
        block_size=settings.block_size,
    )
    return Engine(parts, delay=delay, clock=clock)
