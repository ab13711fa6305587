"""Simulates what was served, and says by how much the two differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun.plan.profile import Profile
from forerun.plan.simulation.profiled import ServingCost, profiled_engine
from forerun.plan.simulation.requests import SimulatedRequest
from forerun.plan.simulation.result import SimulationResult

NUM_BISECTIONS, NUM_TURNS = 14, 4
LATENCIES = ("ttft", "tpot", "e2el")
GOALS = {"mean": (0.05, 0.08), "p95": (0.10, 0.15)}
"""The errors that a mean and a 95th percentile should stay within, and must."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One run, served and simulated: figures by name, latencies in milliseconds, throughput in output tokens per second."""

    config: str
    load: str
    share: float
    num_requests: int
    gigabytes_per_second: float
    real: dict[str, float]
    simulated: dict[str, float]

    @property
    def errors(self) -> dict[str, float]:
        """Simulated / real - 1, of each figure."""
        return {name: self.simulated[name] / value - 1 for name, value in self.real.items()}

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {
            "config": self.config,
            "load": self.load,
            "share": self.share,
            "num_requests": self.num_requests,
            "gigabytes_per_second": self.gigabytes_per_second,
            "real": self.real,
            "simulated": self.simulated,
            "errors": self.errors,
        }


def compare(
    run: Mapping[str, Any], profile: Profile, serving: ServingCost, prompts: Sequence[Sequence[int]], *, seed: int
) -> Compared:
    """Simulate a served run from a profile.

    The simulation is told when each request was sent, its prompt, how long its answer was, and the memory's
    bandwidth at the time; nothing of what came of them.

    Args:
        run: what `runs.measure` kept.
        profile: made before.
        serving: fitted before.
        prompts: token ids of each request's prompt.
        seed: of the simulated drafts.
    """
    return Compared(
        config=run["config"],
        load=run["load"],
        share=run["share"],
        num_requests=len(prompts),
        gigabytes_per_second=run["gigabytes_per_second"],
        real=_real_figures(run),
        simulated=_simulated_figures(_simulate(run, profile, serving, prompts, seed=seed)),
    )


def fit_serving(run: Mapping[str, Any], profile: Profile, prompts: Sequence[Sequence[int]]) -> ServingCost:
    """What the server takes for each chunk and each request, so that means of TPOT and then TTFT are those of a served run."""
    real = _real_figures(run)

    def error(name: str, serving: ServingCost) -> float:
        return _simulated_figures(_simulate(run, profile, serving, prompts, seed=0))[name] - real[name]

    per_chunk = per_request = 0.0
    for _ in range(NUM_TURNS):  # each has a little part in what the other is fitted to
        per_chunk = _root(
            lambda found, other: error("mean_tpot", ServingCost(seconds_per_request=other, seconds_per_chunk=found)),
            per_request,
            most=0.01,
        )
        per_request = _root(
            lambda found, other: error("mean_ttft", ServingCost(seconds_per_request=found, seconds_per_chunk=other)),
            per_chunk,
            most=0.1,
        )
    return ServingCost(seconds_per_request=per_request, seconds_per_chunk=per_chunk)


def _root(error: Callable[[float, float], float], other: float, *, most: float) -> float:
    """Where an error that rises with its first argument is 0, from 0 to `most`, by bisection."""
    low, high = 0.0, most
    if error(low, other) >= 0:
        return low
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if error(middle, other) < 0 else (low, middle)
    return (low + high) / 2


def _simulate(
    run: Mapping[str, Any], profile: Profile, serving: ServingCost, prompts: Sequence[Sequence[int]], *, seed: int
) -> SimulationResult:
    lengths = [len(ids) for ids in prompts]
    assert lengths == run["input_lens"], "the same prompts in the same order"
    start = min(run["start_times"])
    order = sorted(range(len(prompts)), key=run["start_times"].__getitem__)
    requests = [
        SimulatedRequest(
            arrival=run["start_times"][number] - start,
            num_prompt_tokens=len(prompts[number]),
            num_output_tokens=run["output_lens"][number],
            prompt_ids=prompts[number],
        )
        for number in order
    ]
    engine = profiled_engine(profile, run["config"], gigabytes_per_second=run["gigabytes_per_second"], serving=serving)
    return engine.simulate(requests, seed=seed)


def _real_figures(run: Mapping[str, Any]) -> dict[str, float]:
    ttfts, latencies = np.array(run["ttfts"]), np.array(run["latencies"])
    lengths = np.array(run["output_lens"])
    ends = np.array(run["start_times"]) + latencies
    is_long = lengths > 1
    values = {
        "ttft": ttfts,
        "tpot": (latencies - ttfts)[is_long] / (lengths[is_long] - 1),
        "e2el": latencies,
    }
    return _figures(float(lengths.sum() / (ends.max() - min(run["start_times"]))), values)


def _simulated_figures(result: SimulationResult) -> dict[str, float]:
    found = {name: np.array([getattr(one, name) for one in result.requests]) for name in LATENCIES}
    return _figures(result.output_throughput, {name: values[~np.isnan(values)] for name, values in found.items()})


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
