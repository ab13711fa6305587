"""Runs requests through engines in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from forerun.core.stats import SpeculationStats
from forerun.engine.simulation import NO_SPECULATION, SimulationSettings
from forerun.engine.speculation import SpeculationControl
from forerun.errors import ConfigError
from forerun.plan.simulation.fleet import Fleet, FleetRun
from forerun.plan.simulation.replica import Replica
from forerun.plan.simulation.requests import SimulatedRequest, check_requests
from forerun.plan.simulation.result import ReplicaOutcome, SimulationResult

ONE_REPLICA = Fleet()


def simulate(
    settings: SimulationSettings,
    requests: Sequence[SimulatedRequest],
    *,
    fleet: Fleet = ONE_REPLICA,
    make_control: Callable[[], SpeculationControl] = lambda: NO_SPECULATION,
    seed: int = 0,
    keeps_chunks: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> SimulationResult:
    """Serve requests in virtual time; the same arguments give the same result.

    Args:
        settings: of each engine.
        requests: in the order of their arrival.
        fleet: the engines and what spreads requests over them.
        make_control: makes the control of draft lengths of each engine.
        seed: of prompts' tokens, texts, acceptance and random routing.
        keeps_chunks: whether each request's record keeps the time of each chunk, some hundred bytes for each.
        progress: is called with the number of requests that have ended.

    Raises:
        ConfigError: requests are not in order or do not fit the engine, or the engine its memory.
    """
    if settings.max_model_len > settings.num_blocks * settings.block_size:
        raise ConfigError(
            f"num_blocks: got {settings.num_blocks} of {settings.block_size} tokens; must hold max_model_len "
            f"({settings.max_model_len}) tokens at least"
        )
    check_requests(requests, max_model_len=settings.max_model_len)
    # a server's profile knows only the tokens that it was sent
    largest = max((max(one.prompt_ids, default=0) for one in requests if one.prompt_ids is not None), default=0)
    settings = replace(settings, seed=seed, vocab_size=max(settings.vocab_size, 1 + largest))
    run = FleetRun(fleet, settings, make_control, seed=seed, keeps_chunks=keeps_chunks)
    records = run.run(requests, progress)
    kinds = [("decode" if fleet.prefill_replicas else "aggregated", run.replicas), ("prefill", run.prefill_replicas)]
    replicas = [(kind, one) for kind, some in kinds for one in some]
    speculation = SpeculationStats()
    for _, replica in replicas:
        speculation.add(replica.engine.stats.speculation)
    return SimulationResult(
        requests=records,
        replicas=[_outcome(kind, replica, settings.num_blocks) for kind, replica in replicas],
        steps=[replica.steps for _, replica in replicas],
        gaps=[replica.gaps for _, replica in replicas],
        lifetimes=run.lifetimes,
        speculation=speculation,
        energy_joules=None,
    )


def _outcome(kind: str, replica: Replica, num_blocks: int) -> ReplicaOutcome:
    state, stats = replica.engine.state, replica.engine.stats
    return ReplicaOutcome.of(
        kind,
        replica.steps,
        num_blocks=num_blocks,
        num_preemptions=state.num_preemptions,
        num_prompt_tokens=stats.num_prompt_tokens,
        num_cached_tokens=state.num_cached_tokens,
    )
