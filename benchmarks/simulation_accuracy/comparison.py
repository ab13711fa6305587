"""Simulates what was served, and says by how much the two differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from forerun.plan.profile import Profile
from forerun.plan.simulation.profiled import ServingCost, profiled_engine
from forerun.plan.simulation.requests import SimulatedRequest
from forerun.plan.simulation.result import SimulationResult

NUM_BISECTIONS, NUM_TURNS = 12, 8
LATENCIES = ("ttft", "tpot", "e2el")
GOALS = {"mean": (0.05, 0.08), "p95": (0.10, 0.15)}
"""The errors that a mean and a 95th percentile should stay within, and must."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """What a real run kept of its requests; lists by request, times in seconds.

    `gigabytes_per_second` is what the memory gave around it, `assumed_gigabytes_per_second` what the simulation is told
    of that; None: nothing, so that steps take as long as in the profile.
    """

    config: str
    load: str
    share: float
    gigabytes_per_second: float
    assumed_gigabytes_per_second: float | None = None
    prompts: Sequence[Sequence[int]]
    kinds: Sequence[str | None]
    input_lens: Sequence[int]
    output_lens: Sequence[int]
    start_times: Sequence[float]
    ttfts: Sequence[float]
    latencies: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The runs of one load, served and simulated: figures by name, latencies in milliseconds, throughput in output tokens per second."""

    config: str
    load: str
    share: float
    num_requests: int
    gigabytes_per_second: list[float]  # of each run
    real: dict[str, float]
    simulated: dict[str, float]

    @property
    def errors(self) -> dict[str, float]:
        """Simulated / real - 1, of each figure."""
        return {name: self.simulated[name] / value - 1 for name, value in self.real.items()}

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self) | {"errors": self.errors}


def compare(runs: Sequence[ServedRun], profile: Profile, serving: ServingCost, *, seed: int) -> Compared:
    """Simulate the served runs of one load from a profile, and compare their requests together.

    The simulation is told when each request was sent, its prompt and the prompt's class, how long its answer was,
    and perhaps the memory's bandwidth at the time; nothing of what came of them.

    Args:
        runs: of one configuration at one load.
        profile: made before.
        serving: fitted before.
        seed: of the simulated drafts.
    """
    first = runs[0]
    return Compared(
        config=first.config,
        load=first.load,
        share=first.share,
        num_requests=sum(len(run.prompts) for run in runs),
        gigabytes_per_second=[run.gigabytes_per_second for run in runs],
        real=_real_figures(runs),
        simulated=_simulated_figures([_simulate(run, profile, serving, seed=seed) for run in runs]),
    )


def fit_serving(idle: Sequence[ServedRun], busy: Sequence[ServedRun], profile: Profile) -> ServingCost:
    """What the server takes for each request, step and chunk.

    With it the simulated mean time per token is that of the idle runs, whose steps write one chunk each, and of
    the busy ones, whose steps write several, and the mean time to the first token is that of the busy ones.
    """

    def error(figure: str, runs: Sequence[ServedRun], cost: ServingCost) -> float:
        simulated = _simulated_figures([_simulate(run, profile, cost, seed=0) for run in runs])
        return simulated[figure] - _real_figures(runs)[figure]

    def cost_of(alone: float, chunk: float, request: float) -> ServingCost:
        """`alone` is what a step of one chunk takes, which the idle runs show."""
        return ServingCost(seconds_per_step=alone - chunk, seconds_per_chunk=chunk, seconds_per_request=request)

    alone = chunk = request = 0.0
    for _ in range(NUM_TURNS):  # each has a little part in what the others are fitted to
        alone = chunk + _root(lambda x: error("mean_tpot", idle, cost_of(chunk + x, chunk, request)), most=0.01)  # noqa: B023
        chunk = _root(lambda x: error("mean_tpot", busy, cost_of(alone, x, request)), most=alone)  # noqa: B023
        request = _root(lambda x: error("mean_ttft", busy, cost_of(alone, chunk, x)), most=0.1)  # noqa: B023
    return cost_of(alone, chunk, request)


def _root(error: Callable[[float], float], *, most: float) -> float:
    """Where an error that rises with its argument is 0, from 0 to `most`, by bisection."""
    low, high = 0.0, most
    if error(low) >= 0:
        return low
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if error(middle) < 0 else (low, middle)
    return (low + high) / 2


def _simulate(run: ServedRun, profile: Profile, serving: ServingCost, *, seed: int) -> SimulationResult:
    assert [len(ids) for ids in run.prompts] == list(run.input_lens), "the same prompts in the same order"
    start = min(run.start_times)
    order = sorted(range(len(run.prompts)), key=run.start_times.__getitem__)
    requests = [
        SimulatedRequest(
            arrival=run.start_times[number] - start,
            num_prompt_tokens=len(run.prompts[number]),
            num_output_tokens=run.output_lens[number],
            prompt_ids=run.prompts[number],
            kind=run.kinds[number],
        )
        for number in order
    ]
    engine = profiled_engine(
        profile, run.config, gigabytes_per_second=run.assumed_gigabytes_per_second, serving=serving
    )
    return engine.simulate(requests, seed=seed)


def _real_figures(runs: Sequence[ServedRun]) -> dict[str, float]:
    ttfts, latencies, lengths = (
        np.concatenate([np.array(getattr(run, name)) for run in runs]) for name in ("ttfts", "latencies", "output_lens")
    )
    is_long = lengths > 1
    values = {
        "ttft": ttfts,
        "tpot": (latencies - ttfts)[is_long] / (lengths[is_long] - 1),
        "e2el": latencies,
    }
    seconds = sum(float((np.array(one.start_times) + one.latencies).max()) - min(one.start_times) for one in runs)
    return _figures(float(lengths.sum()) / seconds, values)


def _simulated_figures(results: Sequence[SimulationResult]) -> dict[str, float]:
    records = [one for result in results for one in result.requests]
    found = {name: np.array([getattr(one, name) for one in records]) for name in LATENCIES}
    throughput = sum(one.num_output_tokens for one in results) / sum(one.seconds for one in results)
    return _figures(throughput, {name: values[~np.isnan(values)] for name, values in found.items()})


def _figures(throughput: float, values: Mapping[str, np.ndarray[Any, np.dtype[np.float64]]]) -> dict[str, float]:
    figures = {"throughput": throughput}
    for name, seconds in values.items():
        figures[f"mean_{name}"] = 1e3 * float(seconds.mean()) if len(seconds) else math.nan
        figures[f"p95_{name}"] = 1e3 * float(np.percentile(seconds, 95)) if len(seconds) else math.nan
    return figures


def summary(compared: Sequence[Compared]) -> dict[str, dict[str, float]]:
    """Mean and largest absolute error of each figure over all runs, and the shares that keep the goal and the limit."""
    found = {}
    for name in compared[0].errors:
        errors = np.abs([one.errors[name] for one in compared])
        goal, limit = GOALS["p95" if name.startswith("p95") else "mean"]
        found[name] = {
            "mean": float(errors.mean()),
            "largest": float(errors.max()),
            "within_goal": float((errors <= goal).mean()),
            "within_limit": float((errors <= limit).mean()),
        }
    return found
