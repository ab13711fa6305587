"""Simulates what was served, and says by how much the two differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, variance
from typing import Any

import numpy as np

from benchmarks.simulation_accuracy.speed import Slowness
from forerun.plan.profile import Profile
from forerun.plan.simulation.arrivals import Floats
from forerun.plan.simulation.profiled import ServingCost, profiled_engine
from forerun.plan.simulation.requests import SimulatedRequest
from forerun.plan.simulation.result import SimulationResult

NUM_ITERATIONS = 10
STEPS = {
    "seconds_per_step": 0.0004,
    "seconds_per_chunk": 0.0002,
    "seconds_per_request": 0.004,
    "seconds_per_idle_request": 0.004,
}
"""Slopes are taken over them."""

SHARES = (1.0, 0.5, 0.25, 0.1)
"""Of what slopes say is to be changed, tried in turn."""
LATENCIES = ("ttft", "tpot", "e2el")
GOALS = {"mean": (0.05, 0.08), "p95": (0.10, 0.15)}
"""The errors that a mean and a 95th percentile should stay within, and must."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """What a real run kept of its requests; lists by request, times in seconds.

    `gigabytes_per_second` is what the memory gave around it; `slowness` how much longer its simulation takes than
    the profile says.
    """

    config: str
    load: str
    round: int
    share: float
    gigabytes_per_second: float
    slowness: Slowness
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
    slowness: list[Slowness]  # of each run
    real: dict[str, float]
    simulated: dict[str, float]
    errors_by_round: list[dict[str, float]]

    @property
    def errors(self) -> dict[str, float]:
        """Simulated / real - 1, of each figure."""
        return _errors(self.simulated, self.real)

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self) | {"errors": self.errors}


def compare(runs: Sequence[ServedRun], profile: Profile, serving: ServingCost, *, seeds: Sequence[int]) -> Compared:
    """Simulate the served runs of one load from a profile, and compare their requests together.

    The simulation is told when each request was sent, its prompt and the prompt's class, how long its answer was,
    and how fast the machine was around it; nothing of what came of them.

    Args:
        runs: of one configuration at one load.
        profile: made before.
        serving: fitted before.
        seeds: of the simulated drafts; figures are means over them.
    """
    first = runs[0]
    simulated = {id(run): [_simulate(run, profile, serving, seed=seed) for seed in seeds] for run in runs}
    by_round = [[run for run in runs if run.round == number] for number in sorted({run.round for run in runs})]

    def of(some: Sequence[ServedRun]) -> dict[str, float]:
        by_seed = [_simulated_figures([simulated[id(run)][place] for run in some]) for place in range(len(seeds))]
        return {name: fmean(one[name] for one in by_seed) for name in by_seed[0]}

    return Compared(
        config=first.config,
        load=first.load,
        share=first.share,
        num_requests=sum(len(run.prompts) for run in runs),
        gigabytes_per_second=[run.gigabytes_per_second for run in runs],
        slowness=[run.slowness for run in runs],
        real=_real_figures(runs),
        simulated=of(runs),
        errors_by_round=[_errors(of(some), _real_figures(some)) for some in by_round],
    )


def _errors(simulated: Mapping[str, float], real: Mapping[str, float]) -> dict[str, float]:
    return {name: simulated[name] / value - 1 for name, value in real.items()}


def fit_serving(calibrations: Sequence[Sequence[ServedRun]], profile: Profile) -> ServingCost:
    """What the server takes for each request, step and chunk, whatever it drafts.

    With it the simulated mean times to the first token and per token come as close as they can to those of all
    loads, in least squares of relative errors by Gauss and Newton's method: with one request at a time a step
    writes one chunk, under load many.

    Args:
        calibrations: the runs of each configuration and load, with the profile's prompts.
        profile: made before.
    """
    figures = [(place, figure) for place in range(len(calibrations)) for figure in ("mean_ttft", "mean_tpot")]
    real = [_real_figures(runs) for runs in calibrations]

    def errors(seconds: Floats) -> Floats:
        cost = ServingCost(**dict(zip(STEPS, seconds.tolist(), strict=True)))
        found = [_simulated_figures([_simulate(run, profile, cost, seed=0) for run in runs]) for runs in calibrations]
        return np.array([math.log(found[place][figure] / real[place][figure]) for place, figure in figures])

    seconds = np.zeros(len(STEPS))
    now = errors(seconds)
    for _ in range(NUM_ITERATIONS):
        slopes = np.stack([(errors(seconds + step) - now) / step.sum() for step in np.diag([*STEPS.values()])], axis=1)
        change = np.linalg.lstsq(slopes, now, rcond=None)[0]
        # Which step an arrival falls into, and what an adaptive length drafts, changes by jumps: slopes promise too much.
        tried = (np.maximum(seconds - share * change, 0.0) for share in SHARES)
        better = ((one, found) for one in tried if np.square(found := errors(one)).sum() < np.square(now).sum())
        following = next(better, None)
        if following is None:
            break
        seconds, now = following
    return ServingCost(**dict(zip(STEPS, seconds.tolist(), strict=True)))


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
    now = replace(profile, step_times=run.slowness.of(profile.step_times))
    engine = profiled_engine(now, run.config, serving=serving)
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


def _figures(throughput: float, values: Mapping[str, Floats]) -> dict[str, float]:
    figures = {"throughput": throughput}
    for name, seconds in values.items():
        figures[f"mean_{name}"] = 1e3 * float(seconds.mean()) if len(seconds) else math.nan
        figures[f"p95_{name}"] = 1e3 * float(np.percentile(seconds, 95)) if len(seconds) else math.nan
    return figures


def summary(compared: Sequence[Compared]) -> dict[str, dict[str, float]]:
    """Of each figure's errors over all loads: their mean, mean and largest size, and the shares that keep the goal and the limit.

    `between_rounds` is how far the errors of one load deviate from round to round (root of the mean variance): what
    nobody foresees of the machine and of single requests. Errors of so many rounds together cannot be expected
    to be smaller than that over the root of the number of rounds.
    """
    found = {}
    for name in compared[0].errors:
        errors = np.array([one.errors[name] for one in compared])
        goal, limit = GOALS["p95" if name.startswith("p95") else "mean"]
        by_round = [[errors[name] for errors in one.errors_by_round] for one in compared]
        variances = [variance(some) for some in by_round if len(some) > 1]
        found[name] = {
            "bias": float(errors.mean()),
            "mean": float(np.abs(errors).mean()),
            "largest": float(np.abs(errors).max()),
            "between_rounds": math.sqrt(fmean(variances)) if variances else math.nan,
            "within_goal": float((np.abs(errors) <= goal).mean()),
            "within_limit": float((np.abs(errors) <= limit).mean()),
        }
    return found
