"""What one engine can do: its latencies at an arrival rate, and the largest rate at which it meets an SLA.

An engine that runs n sequences is a server that finishes n / residence(n) requests per second, so the running
sequences form a birth-death chain (`queueing.load_dependent`); its mean is the fixed point B = rate x residence(B).
Prompts are computed in the same steps: they take a share of the time, which stretches all decoding, and they wait
for each other where the token budget is short. Formulas: docs/planning.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from forerun.plan.latencies import Lognormal, WaitThenServed
from forerun.plan.load import Load
from forerun.plan.queueing import Occupancy, load_dependent, variability
from forerun.plan.serving_policies import EngineModel, ServingPolicy
from forerun.plan.sla import Sla

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

LIFETIME_AVERAGING = 2.0 / math.e
"""How much of the variance of the batch size remains in a mean over one request's life.

The batch size is correlated over as long as a request runs, exp(-t / life); its mean over one life keeps
2 (1 - (1 - 1 / e)) = 2 / e of its variance."""

NUM_PROMPT_LENGTHS = 16  # equally likely ones that stand for a spread of prompt lengths
RATE_GRID = 33
RATE_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What an engine does at several arrival rates. A rate that it cannot keep up with has infinite latencies."""

    rates: Floats
    is_stable: npt.NDArray[np.bool_]
    ttft: WaitThenServed
    tpot: Lognormal
    icl: Lognormal
    e2el: Lognormal
    batch_size: Floats  # mean sequences that run at once
    acceptance_length: Floats  # tokens per sequence and step
    utilization: Floats  # of the most that it can serve, 1: no more
    prompt_share: Floats  # of the time that prompts take
    wait_chance: Floats  # that a request finds all places taken

    def attainment(self, sla: Sla) -> Floats:
        """The share of requests that keep all limits, by rate; latencies are taken for independent."""
        share = np.where(self.is_stable, 1.0, 0.0)
        limits = ((self.ttft, sla.ttft), (self.tpot, sla.tpot), (self.icl, sla.icl), (self.e2el, sla.e2el))
        for latency, limit in limits:
            if limit is not None:
                share = share * latency.share_within(limit)
        return share


class _Steady:
    """One engine in its steady state at several arrival rates: what all latencies are computed from."""

    def __init__(self, engine: EngineModel, policy: ServingPolicy, load: Load, rates: Floats) -> None:
        self.engine, self.policy, self.load, self.rates = engine, policy, load, rates
        # one of several that share a load at random gets arrivals that are nearer to a Poisson process
        self.arrival_cv2 = 1.0 + (load.cv**2 - 1.0) * np.minimum(1.0, rates / load.rate)
        self.cached = load.isl - load.computed_isl
        self.prompt_seconds = engine.prompt_seconds(load.isl, cached=self.cached)
        self.budget = max(1.0, engine.max_num_batched_tokens - policy.max_num_seqs / 2.0)
        self.tokens_after = max(0.0, load.osl - 1.0)
        self.steps = policy.steps_for(self.tokens_after)

        self.prompt_share = rates * self.prompt_seconds
        has_time = self.prompt_share < 1.0
        self.stretch = 1.0 / np.where(has_time, 1.0 - self.prompt_share, 1.0)
        first_steps = math.ceil(load.computed_isl / self.budget) * policy.step_seconds + self.prompt_seconds
        residence = self.stretch[:, None] * (policy.step_seconds * self.steps) + first_steps
        numbers = np.arange(1, policy.max_num_seqs + 1)
        self.occupancy: Occupancy = load_dependent(rates, numbers / residence)
        self.seen = self.occupancy.seen_share
        self.step = (self.seen @ policy.step_seconds) * self.stretch

        # prompts wait for each other: each takes its rows' share of a step, and their time
        self.prompt_service = load.computed_isl / self.budget * (self.seen @ policy.step_seconds) + self.prompt_seconds
        prompt_load = rates * self.prompt_service
        self.is_stable: Bools = self.occupancy.is_stable & has_time & (prompt_load < 1.0)
        self.prompt_load = np.where(self.is_stable, prompt_load, 0.0)
        limit_rates = policy.max_num_seqs / residence[:, -1]
        busiest = np.maximum(rates / limit_rates, prompt_load)
        self.utilization = np.where(has_time, busiest, np.maximum(busiest, self.prompt_share))

    def ttft(self) -> WaitThenServed:
        """Wait for a place and for earlier prompts, for the step that runs, then the prompt's own steps."""
        by_prompts = variability(self.arrival_cv2, self.load.isl_cv**2) * self.prompt_service
        prompt_wait = by_prompts * self.prompt_load / (1.0 - self.prompt_load)
        place_wait = variability(self.arrival_cv2, self.load.osl_cv**2) * self.occupancy.mean_wait
        chance = 1.0 - (1.0 - self.prompt_load) * (1.0 - self.occupancy.wait_chance)
        wait = prompt_wait + np.where(self.is_stable, place_wait, 0.0)
        # the step in which an arrival finds the engine, if it finds it busy, has half of its time to go
        residual = (1.0 - self.occupancy.share[:, 0]) * self.step / 2.0
        idle_step = self.engine.step_times.seconds(num_rows=0, num_sequences=0, num_context_tokens=0)
        steps_beside = self.occupancy.share @ np.concatenate([[idle_step], self.policy.step_seconds])
        own = []
        for length in _equally_likely(self.load.computed_isl, self.load.isl_cv):
            seconds = self.engine.prompt_seconds(self.cached + length, cached=self.cached)
            own.append(residual + math.ceil(length / self.budget) * steps_beside + seconds)
        return WaitThenServed(
            service=np.stack(own, axis=1),
            wait_chance=np.where(self.is_stable, chance, 1.0),
            mean_wait_of_waiting=np.where(self.is_stable, wait / np.maximum(chance, 1e-12), np.inf),
        )

    def icl(self) -> Lognormal:
        """Mean seconds between the messages of a stream: those of a step."""
        if self.tokens_after <= 0.0:
            return self._nothing()
        variance = (self.seen @ self.policy.step_seconds**2) * self.stretch**2 - self.step**2
        life = self.tokens_after * self._pace
        return Lognormal(self.step, self._batch_cv2(self.step, variance) + self._stall_cv2(life))

    def tpot(self) -> Lognormal:
        """Mean seconds per token after the first."""
        if self.tokens_after <= 0.0:
            return self._nothing()
        variance = (self.seen @ self._per_token**2) * self.stretch**2 - self._pace**2
        luck = self.policy.variance_of_tokens / self.policy.tokens_per_step / self.tokens_after
        life = self.tokens_after * self._pace
        cv2 = self._batch_cv2(self._pace, variance) + self._stall_cv2(life) + self.seen @ luck
        return Lognormal(self._pace, cv2)

    @property
    def _per_token(self) -> Floats:
        return self.policy.step_seconds * self.steps / self.tokens_after

    @property
    def _pace(self) -> Floats:
        pace: Floats = (self.seen @ self._per_token) * self.stretch
        return pace

    def _batch_cv2(self, mean: Floats, variance: Floats) -> Floats:
        """What the changing batch size adds; bursts of arrivals make it change more."""
        return LIFETIME_AVERAGING * (1.0 + self.arrival_cv2) / 2.0 * np.maximum(variance, 0.0) / mean**2

    def _stall_cv2(self, life: Floats) -> Floats:
        """What the prompts add that others bring during a request's life; their number is Poisson, or in clumps."""
        squares = self.prompt_seconds**2 * (1.0 + self.load.isl_cv**2) * (1.0 + self.arrival_cv2) / 2.0
        return self.rates * squares / life

    def _nothing(self) -> Lognormal:
        zeros = np.zeros_like(self.rates)
        return Lognormal(zeros, zeros)


def predict(engine: EngineModel, policy: ServingPolicy, load: Load, rates: Floats) -> Prediction:
    """What an engine does with a load's requests at each of several rates of its own, [rates] per second.

    The load's own rate says of how many engines it is one: cv² - 1 of the arrivals shrinks with its share of them.
    """
    steady = _Steady(engine, policy, load, np.asarray(rates, dtype=np.float64))
    ttft, tpot = steady.ttft(), steady.tpot()
    after_first = steady.tokens_after * tpot.mean
    mean = ttft.mean + after_first
    variance = ttft.variance + after_first**2 * (tpot.cv2 + load.osl_cv**2)
    is_stable = steady.is_stable
    cv2 = np.where(is_stable, variance, 1.0) / np.where(is_stable, mean, 1.0) ** 2
    return Prediction(
        rates=steady.rates,
        is_stable=is_stable,
        ttft=ttft,
        tpot=tpot,
        icl=steady.icl(),
        e2el=Lognormal(mean, cv2),
        batch_size=steady.occupancy.mean_served,
        acceptance_length=steady.seen @ policy.tokens_per_step,
        utilization=steady.utilization,
        prompt_share=steady.prompt_share,
        wait_chance=steady.occupancy.wait_chance,
    )


def _equally_likely(mean: float, cv: float) -> list[float]:
    """Lognormal lengths of a mean and a coefficient of variation, each as likely as the others."""
    if cv == 0.0:
        return [mean]
    variance = math.log1p(cv**2)
    shares = [(number + 0.5) / NUM_PROMPT_LENGTHS for number in range(NUM_PROMPT_LENGTHS)]
    return [mean * math.exp(NormalDist().inv_cdf(share) * math.sqrt(variance) - variance / 2.0) for share in shares]


def max_rate(engine: EngineModel, policy: ServingPolicy, load: Load, sla: Sla) -> float:
    """The most requests per second at which an engine attains the SLA; 0: not even when idle.

    Found on grids of rates, each within the interval of the one before, as a bisection into 32 parts would.
    """
    residence = policy.step_seconds * np.maximum(1.0, policy.steps_for(load.osl - 1.0))
    low, high = 0.0, float(np.max(np.arange(1, policy.max_num_seqs + 1) / residence))
    for _ in range(RATE_ROUNDS):
        rates = np.linspace(low, high, RATE_GRID)[1:]
        fails = predict(engine, policy, load, rates).attainment(sla) < sla.attainment
        if not fails.any():
            return high
        first = int(np.argmax(fails))
        low, high = (low if first == 0 else float(rates[first - 1])), float(rates[first])
    return low
