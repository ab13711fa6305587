"""What requests see of counts of engines that are alike: each serves whole requests, or some compute prompts and others decode.

Engines for prompts serve one line, and hand the KV to those that decode. Formulas: docs/planning.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from forerun.plan.capacity import Prediction, Routing, predict
from forerun.plan.latencies import Lognormal, WaitThenServed
from forerun.plan.lengths import prompt_lengths, tokens_after_first
from forerun.plan.load import Load
from forerun.plan.queueing import erlang_c, mean_wait
from forerun.plan.serving_policies import EngineModel, ServingPolicy
from forerun.plan.simulation.fleet import Transfer

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


class _Predicted:
    """What is predicted of counts of engines, each count once."""

    def __init__(self, predict: Callable[[Counts], Prediction]) -> None:
        self._predict = predict
        self._places: dict[int, int] = {}  # by count
        self._found: Prediction | None = None

    def at(self, counts: Counts) -> Prediction:
        """What is predicted of these counts, no two of them equal."""
        missing = [count for count in counts.tolist() if count not in self._places]
        if missing:
            self._places.update((count, place) for place, count in enumerate(missing, len(self._places)))
            new = self._predict(np.array(missing))
            self._found = new if self._found is None else self._found.and_then(new)
        assert self._found is not None, "at least one count is asked for"
        return self._found.at(np.array([self._places[count] for count in counts.tolist()]))


@dataclass(frozen=True, kw_only=True)
class FleetPrediction:
    """Predicts what the requests of one load see, by how engines are run and how many there are.

    `engine` is what each engine is, `load` what arrives in all, `transfer` what handing over a prompt's KV takes, `routing`
    which engine a request is sent to.
    """

    engine: EngineModel
    load: Load
    transfer: Transfer
    routing: Routing = Routing.LEAST_REQUESTS

    def together(self, policy: ServingPolicy, counts: Counts) -> Prediction:
        """What requests see of each count of engines that serve whole requests; no two counts are equal."""
        return self._predict(policy, self.load, counts)

    def apart(self, policy: ServingPolicy, prefill: int | Counts, decode: int | Counts) -> Prediction:
        """What requests see of `prefill` engines, for which prompts wait in one line, and `decode` ones, each with its part of the load.

        Counts are numbers or arrays, paired.
        """
        load = self.load
        prefill, decode = np.broadcast_arrays(np.atleast_1d(prefill), np.atleast_1d(decode))
        # whoever decodes has all KV but that of the first token, which gives the second
        handed = replace(load, osl=max(1.0, load.osl - 1.0), isl_cv=0.0, prefix_hit_rate=1.0 - 1.0 / load.isl)
        counts, numbers = np.unique(decode, return_inverse=True)
        at = self._predict(policy, handed, counts).at(numbers)
        ttft = self.first_tokens(prefill)
        if load.osl <= 1.0:
            zeros = np.zeros(len(decode))
            nothing = Lognormal(zeros, zeros)
            with np.errstate(invalid="ignore"):
                e2el = Lognormal(ttft.mean, np.nan_to_num(ttft.variance / ttft.mean**2))
            return replace(at, is_stable=np.isfinite(ttft.mean), ttft=ttft, tpot=nothing, icl=nothing, e2el=e2el)
        between = self.transfer.of_prompt(round(load.isl))
        spread = ((between - self.transfer.seconds) * load.isl_cv) ** 2  # its variance
        second = between + at.ttft.mean, at.ttft.variance + spread  # mean and variance of the second token's wait
        after = np.tile(tokens_after_first(load), (len(decode), 1))
        with np.errstate(invalid="ignore"):
            tpot = _beginning_with(*second, at.tpot, after)
            icl = _beginning_with(*second, at.icl, np.maximum(1.0, after / at.acceptance_length[:, None]))
            mean = ttft.mean + between + at.e2el.mean
            e2el = Lognormal(mean, np.nan_to_num((ttft.variance + spread + at.e2el.variance) / mean**2))
        return replace(at, is_stable=at.is_stable & np.isfinite(mean), ttft=ttft, tpot=tpot, icl=icl, e2el=e2el)

    def first_tokens(self, counts: Counts) -> WaitThenServed:
        """Time to first token of so many engines that do nothing else, [counts].

        Prompts wait for them in one line; where they are sent at random, for each engine in a line of its own. Of arrivals with a
        squared coefficient of variation c, one in n, by chance, has 1 + (c - 1) / n.
        """
        load, service = self.load, self.prompt_seconds
        cv2 = float(self._seconds_of_prompts.var()) / service**2
        chances, waits = np.zeros(len(counts)), np.zeros(len(counts))
        for place, count in enumerate(counts.tolist()):
            num_lines = count if self.routing is Routing.RANDOM else 1
            rate, servers = load.rate / num_lines, count // num_lines
            arrival_cv2 = 1.0 + (load.cv**2 - 1.0) / num_lines
            chances[place] = erlang_c(servers, rate * service)
            waits[place] = mean_wait(rate, service, servers, arrival_cv2=arrival_cv2, service_cv2=cv2)
        return WaitThenServed(
            service=np.tile(self._seconds_of_prompts, (len(counts), 1)),
            wait_chance=chances,
            mean_wait_of_waiting=np.divide(waits, chances, out=np.zeros_like(waits), where=chances > 0.0),
        )

    @property
    def prompt_seconds(self) -> float:
        """Mean seconds of a prompt in an engine that does nothing else."""
        return float(self._seconds_of_prompts.mean())

    @cached_property
    def _seconds_of_prompts(self) -> Floats:
        """The same of equally likely prompts."""
        load, engine = self.load, self.engine
        chunks = np.ceil(prompt_lengths(load) / engine.max_num_batched_tokens)
        idle = engine.step_times.seconds(num_rows=0, num_sequences=0, num_context_tokens=0)
        seconds: Floats = chunks * idle + engine.seconds_of_prompts(load)
        return seconds

    @cached_property
    def _predicted(self) -> dict[tuple[int, Load], _Predicted]:
        """By the id of a policy, which they hold, and its load."""
        return {}

    def _predict(self, policy: ServingPolicy, load: Load, counts: Counts) -> Prediction:
        key = id(policy), load
        if key not in self._predicted:
            self._predicted[key] = _Predicted(functools.partial(self._predict_anew, policy, load))
        return self._predicted[key].at(counts)

    def _predict_anew(self, policy: ServingPolicy, load: Load, counts: Counts) -> Prediction:
        return predict(
            self.engine, policy, load, load.rate / counts, num_engines=counts.astype(np.float64), routing=self.routing
        )


def _beginning_with(mean: Floats, variance: Floats, gaps: Lognormal, counts: Floats) -> Lognormal:
    """The mean of all gaps of a request, of which the first has this mean and variance, and the others are as `gaps` says.

    Of n gaps it is gap + (first - gap) / n, so how many there are counts only as far as the first one is longer.

    Args:
        mean: [rates], seconds of the first gap.
        variance: [rates], of the same.
        gaps: the mean of a request's other gaps.
        counts: [rates, points], equally likely numbers of gaps.
    """
    share, spread = (1.0 / counts).mean(axis=1), (1.0 / counts).var(axis=1)
    longer = mean - gaps.mean
    all_mean = gaps.mean + share * longer
    of_gaps = (1.0 - share) ** 2 * gaps.variance + (share**2 + spread) * variance
    return Lognormal(all_mean, np.nan_to_num((of_gaps + spread * longer**2) / all_mean**2))
