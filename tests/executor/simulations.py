"""Engines over the simulated executor."""

from __future__ import annotations

import random

from forerun.engine.engine import Engine, EngineParts
from forerun.engine.request import RequestProcessor
from forerun.engine.scheduler import Scheduler, SchedulerLimits
from forerun.engine.speculation import FixedLength
from forerun.executor.simulated import ConditionalAcceptance, SimulatedExecutor, VirtualClock
from forerun.kv.block_pool import BlockPool

VOCAB_SIZE = 97
EOS = 5


def simulated_engine(
    *,
    rates=None,
    num_speculative_tokens=None,
    schedule=(),
    delay=0,
    num_blocks=512,
    block_size=4,
    max_model_len=128,
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    enable_prefix_caching=True,
    step_seconds=lambda plan: 0.004 + 0.0001 * len(plan.rows.token_ids),
):
    """An engine in virtual time; `rates` are the conditional acceptance of its drafts."""
    clock = VirtualClock()
    executor = SimulatedExecutor(
        vocab_size=VOCAB_SIZE,
        step_seconds=step_seconds,
        clock=clock,
        acceptance=None if rates is None else ConditionalAcceptance(tuple(rates)),
    )
    pool = BlockPool(num_blocks, enable_prefix_caching=enable_prefix_caching)
    limits = SchedulerLimits(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    num_tokens = len(rates or ()) if num_speculative_tokens is None else num_speculative_tokens
    parts = EngineParts(
        processor=RequestProcessor(
            tokenizer=None,
            executor=executor,
            vocab_size=VOCAB_SIZE,
            max_model_len=max_model_len,
            eos_token_ids=frozenset({EOS}),
            pool=pool,
            block_size=block_size,
            random_source=random.Random(0),
        ),
        pool=pool,
        scheduler=Scheduler(pool, limits, block_size=block_size),
        executor=executor,
        control=FixedLength(num_speculative_tokens=num_tokens, schedule=schedule),
        block_size=block_size,
    )
    return Engine(parts, delay=delay, clock=clock)


def run(engine, prompts, sampling):
    """Outputs of prompts that all arrive at once; `sampling` for all, or a list."""
    each = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
    for i, (prompt, params) in enumerate(zip(prompts, each, strict=True)):
        engine.add_request(str(i), prompt, params)
    finished = drain(engine)
    return [finished[str(i)] for i in range(len(prompts))]


def drain(engine):
    """Step until there is no work; outputs by request id."""
    finished = {}
    while engine.has_work:
        finished |= {output.request_id: output for output in engine.step().finished}
    return finished


def assert_nothing_is_held(engine):
    """No sequence and no block is left behind, nor anything at the executor."""
    parts = engine.parts
    assert not parts.scheduler.has_work
    assert parts.pool.num_free == parts.pool.num_blocks
    parts.pool.check_integrity()
    assert not parts.executor._states
