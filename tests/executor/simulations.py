"""Engines over the simulated executor."""

from __future__ import annotations

from forerun.engine import simulation
from forerun.engine.simulation import SimulationSettings
from forerun.engine.speculation import FixedLength
from forerun.executor.simulated_text import ConditionalAcceptance

VOCAB_SIZE = 97
EOS = 5
SMALL = {"num_blocks": 512, "block_size": 4, "max_model_len": 128}


def simulated_engine(*, rates=None, delay=0, **settings):
    """A small engine in virtual time; `rates` are the conditional acceptance of its drafts."""
    drafting, control = {}, FixedLength(num_speculative_tokens=0 if rates is None else len(rates))
    if rates is not None:
        drafting = {"drafting": ConditionalAcceptance(tuple(rates))}
    known = {"vocab_size": VOCAB_SIZE, "eos_token_ids": frozenset({EOS})}
    return simulation.simulated_engine(
        SimulationSettings(**(known | SMALL | drafting | settings)), control, delay=delay
    )


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
    assert not [*parts.scheduler.waiting, *parts.scheduler.running]
    assert parts.pool.num_free == parts.pool.num_blocks
    parts.pool.check_integrity()
    assert not parts.executor._states
