"""What one engine can do: its latencies at an arrival rate, and the largest rate at which it meets an SLA.

An engine that runs n sequences is a server that finishes n / residence(n) requests per second, so the running
sequences form a birth-death chain (`queueing.load_dependent`); its mean is the fixed point B = rate x residence(B).
Prompts are computed in the same steps: they take a share of the time, which stretches all decoding, and they wait
for each other where the token budget is short. Formulas: docs/planning.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.plan.arrival_moments import moments, poisson, soon_after
from forerun.plan.balanced import balance, pooled_wait
from forerun.plan.latencies import Counts, Lognormal, WaitThenServed
from forerun.plan.lengths import prompt_lengths, tokens_after_first
from forerun.plan.load import Load
from forerun.plan.queueing import Occupancy, load_dependent, variability
from forerun.plan.serving_policies import EngineModel, ServingPolicy
from forerun.plan.sla import Sla

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

LEAST_ELASTICITY = 0.01  # of departures by batch size; an engine that gets no faster by more sequences has 0
BALANCE_ROUNDS = 8
SETTLED = 1e-9  # of a batch size, by which a round may change it for the last time
HALVINGS = 32  # that find a rate to a billionth of the largest
RATE_GRID = 33
RATE_ROUNDS = 3


class Routing(StrEnum):
    """Which engine a request is sent to."""

    LEAST_REQUESTS = "least-requests"  # that with the fewest
    RANDOM = "random"  # any: the safe side for routers that balance badly


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
    utilization: Floats  # rate over the most that it can serve: from 1 on it cannot keep up
    busy_share: Floats  # of the time that an engine steps
    prompt_share: Floats  # of the time that prompts take
    wait_chance: Floats  # that a request finds all places taken

    def at(self, rates: Counts) -> Prediction:
        """The same for some of the rates, by their numbers."""
        found: dict[str, Any] = {}
        for one in fields(self):
            part = getattr(self, one.name)
            found[one.name] = part[rates] if isinstance(part, np.ndarray) else part.at(rates)
        return Prediction(**found)

    def and_then(self, other: Prediction) -> Prediction:
        """The same for these rates and then for those of another prediction."""
        return Prediction(
            **{one.name: _joined(getattr(self, one.name), getattr(other, one.name)) for one in fields(self)}
        )

    def attainment(self, sla: Sla) -> Floats:
        """The share of requests that keep all limits, by rate; latencies are taken for independent."""
        share = np.where(self.is_stable, 1.0, 0.0)
        limits = ((self.ttft, sla.ttft), (self.tpot, sla.tpot), (self.icl, sla.icl), (self.e2el, sla.e2el))
        for latency, limit in limits:
            if limit is not None:
                share = share * latency.share_within(limit)
        return share


def _joined(first: Any, second: Any) -> Any:
    """Arrays one after the other, or those of two records."""
    if isinstance(first, np.ndarray):
        return np.concatenate([first, second])
    parts = (_joined(getattr(first, one.name), getattr(second, one.name)) for one in fields(first))
    return type(first)(*parts)


class _Steady:
    """One engine in its steady state at several arrival rates: what all latencies are computed from."""

    def __init__(
        self,
        engine: EngineModel,
        policy: ServingPolicy,
        load: Load,
        rates: Floats,
        num_engines: Floats,
        routing: Routing,
    ) -> None:
        self.engine, self.policy, self.load, self.rates = engine, policy, load, rates
        self.num_engines = num_engines
        self.seconds_of_prompts = engine.seconds_of_prompts(load)
        self.prompt_seconds = float(self.seconds_of_prompts.mean())
        self.prompt_cv2 = float(self.seconds_of_prompts.var()) / max(self.prompt_seconds, 1e-12) ** 2
        self.budget = max(1.0, engine.max_num_batched_tokens - policy.max_num_seqs / 2.0)
        self.tokens_after = max(0.0, load.osl - 1.0)
        self.steps = policy.steps_for(self.tokens_after)
        self.is_balanced: Bools = (num_engines > 1.0) & (routing is Routing.LEAST_REQUESTS)
        # of engines that share arrivals at random each has almost Poisson ones; a router that balances spaces them
        at_random = 1.0 + (load.cv**2 - 1.0) / num_engines
        self.arrival_cv2 = np.where(self.is_balanced, load.cv**2 / num_engines, at_random)
        self.clumping = np.where(self.is_balanced, 0.0, self.arrival_cv2 - 1.0)

        prompt_share = rates * self.prompt_seconds
        has_time = prompt_share < 1.0
        self._full_prompt_share = np.where(has_time, prompt_share, 0.0)
        self._meet(np.ones_like(rates))
        residence = self._residence()
        numbers = np.arange(1, policy.max_num_seqs + 1)
        found: Occupancy = load_dependent(rates, numbers / residence)
        self._settle(found, residence)
        self.averaged = _averaged(numbers / residence, self.seen)
        self.step = self._seen_mean(policy.step_seconds)

        # where the token budget is short, prompts wait in line: each takes its rows' share of a step, and their time
        self.prompt_service = load.computed_isl / self.budget * (self.seen @ policy.step_seconds) + self.prompt_seconds
        prompt_load = rates * self.prompt_service
        self.is_stable: Bools = found.is_stable & has_time & (prompt_load < 1.0)
        self.prompt_load = np.where(self.is_stable, prompt_load, 0.0)
        # without time to decode in, the chain says nothing of the steps in which prompts wait: they are full ones
        in_full_steps = rates * (load.computed_isl / self.budget * policy.step_seconds[-1] + self.prompt_seconds)
        in_line = np.where(has_time, prompt_load, in_full_steps)
        self.utilization = np.maximum(rates / self._most_started(), in_line)

    def _meet(self, company: Floats) -> None:
        """Let each request meet so much of its engine's arrivals, [rates]: their prompts stretch its steps."""
        self.company = company
        self.prompt_share = self._full_prompt_share * company
        self.stretch = 1.0 / (1.0 - self.prompt_share)

    def _residence(self) -> Floats:
        """Seconds of a request in its engine with what it meets there, [rates, places]."""
        first_steps = math.ceil(self.load.computed_isl / self.budget) * self.policy.step_seconds + self.prompt_seconds
        decoding = self.stretch[:, None] * (self.policy.step_seconds * self.steps)
        return first_steps + decoding + (self.company_seconds[:, None] if self.tokens_after else 0.0)

    def _most_started(self) -> Floats:
        """Requests per second, [rates], with which all places are always taken: where rate x residence, which rises, is their number."""
        prompt, places, full_step = self.prompt_seconds, self.policy.max_num_seqs, self.policy.step_seconds[-1]
        first_steps = math.ceil(self.load.computed_isl / self.budget) * full_step + prompt
        decoding = full_step * self.steps[-1]
        low = np.zeros_like(self.rates)
        high = np.full_like(self.rates, min(places / (first_steps + decoding), 1.0 / max(prompt, 1e-12)))
        for _ in range(HALVINGS):
            middle = (low + high) / 2.0
            share = middle * prompt
            company = self._company_seconds(share) if self.tokens_after else 0.0
            is_more = middle * (first_steps + decoding / (1.0 - share) + company) > places
            low, high = np.where(is_more, low, middle), np.where(is_more, middle, high)
        return high

    def _settle(self, found: Occupancy, residence: Floats) -> None:
        """How full the engine is, as its requests, its time and its arrivals see it."""
        self.seen, self.share, self.met = found.seen_share, found.share, found.share
        self.batch_size, self.wait_chance, self.mean_wait = found.mean_served, found.wait_chance, found.mean_wait
        if not self.is_balanced.any():
            return
        places, numbers = self.policy.max_num_seqs, np.arange(self.policy.max_num_seqs + 1)
        variance = found.share @ numbers**2 - found.mean_served**2
        slowed = np.maximum(1.0, variance / np.maximum(found.mean_served, 1e-12))
        peakedness = slowed * (1.0 + self.load.cv**2) / 2.0
        served = found.mean_served
        for _ in range(BALANCE_ROUNDS):  # the fixed point B = rate x residence(B), from above
            level = balance(served, self.num_engines, peakedness, places)
            self._meet(np.where(self.is_balanced, level.company, 1.0))
            after = np.minimum(self.rates * (level.seen_share * self._residence()).sum(axis=1), places)
            moves = np.abs(after - served) > SETTLED * served
            if not moves.any():
                break
            served = np.where(moves, after, served)  # what has settled stays, however long others take
        rows = self.is_balanced[:, None]
        self.seen = np.where(rows, level.seen_share, self.seen)
        self.share = np.where(rows, level.share, self.share)
        self.met = np.where(rows, level.met_share, self.met)
        self.batch_size = np.where(self.is_balanced, served, self.batch_size)
        most = places / residence[:, -1]
        usable = np.where(found.is_stable, self.rates / most, 0.0)
        chance, wait = pooled_wait(places * self.num_engines, usable, self.num_engines * (most - self.rates))
        is_pooled = self.is_balanced & found.is_stable
        self.wait_chance = np.where(is_pooled, chance, self.wait_chance)
        self.mean_wait = np.where(is_pooled, wait, self.mean_wait)

    def _seen_mean(self, seconds: Floats) -> Floats:
        """The mean over a request's life of what depends on the batch size, stretched by prompts, [rates].

        Where arrivals come in clumps, the batch that a request sees is larger by half of ca² - 1, as far as there are places.
        """
        slope = np.gradient(seconds) if len(seconds) > 1 else np.zeros_like(seconds)
        mean = self.seen @ seconds + self.clumping / 2.0 * (self.seen @ slope)
        within: Floats = np.clip(mean, seconds.min(), seconds.max()) * self.stretch
        return within

    def _seen_variance(self, seconds: Floats) -> Floats:
        """The variance of the same over one life; clumps make the batch size change more."""
        mean = self.seen @ seconds
        variance = np.maximum(self.seen @ seconds**2 - mean**2, 0.0) * self.stretch**2
        return self.averaged * (1.0 + self.arrival_cv2) / 2.0 * variance

    def _excess_seconds(self, prompt_share: Floats) -> Floats:
        """Var(step) / E(step), [rates], which prompts cause that take such a share of time.

        The prompts that arrive during a step are computed in the next one, so its length D follows
        D' = T + P x arrivals(D); its variance is rate P² (ca² + cs²) E(D) / (1 - prompt_share²).
        """
        clumps = self.arrival_cv2 + self.prompt_cv2
        return prompt_share * self.prompt_seconds * clumps / (1.0 - prompt_share**2)

    @property
    def company_seconds(self) -> Floats:
        """How much later a request ends, [rates], for the prompts that came when it came."""
        return self._company_seconds(self.prompt_share)

    def _company_seconds(self, prompt_share: Floats) -> Floats:
        """The same where prompts take such a share of time.

        The step with its own prompt is longer than others, so more prompts arrive in it than in others, and
        so on: a geometric series in the prompts' share of time.
        """
        caused = prompt_share * self._excess_seconds(prompt_share)
        beside = self.prompt_seconds * np.maximum(0.0, self.arrival_cv2) + caused
        return beside * prompt_share / (1.0 - prompt_share)

    def ttft(self) -> WaitThenServed:
        """Wait for a place, for the step that runs, and for earlier prompts; then the steps with the prompt."""
        finite_wait = np.where(self.is_stable, self.mean_wait, 0.0)
        place_wait = variability(self.arrival_cv2, self.load.osl_cv**2) * finite_wait
        in_line = variability(self.arrival_cv2, self.prompt_cv2) * self.prompt_service
        # prompts longer than the budget are served in line, short ones all in the next step
        lined = min(1.0, self.load.computed_isl / self.budget)
        line_wait = lined * in_line * self.prompt_load / (1.0 - self.prompt_load)
        wait = line_wait + place_wait
        chance = 1.0 - (1.0 - self.prompt_load) * (1.0 - self.wait_chance)
        return WaitThenServed(
            service=self._prompt_steps(1.0 - lined),
            wait_chance=np.where(self.is_stable, chance, 1.0),
            mean_wait_of_waiting=np.where(self.is_stable, wait / np.maximum(chance, 1e-12), np.inf),
        )

    def _prompt_steps(self, together: float) -> Floats:
        """Seconds from being first in line to the first token at equally likely moments, [rates, moments].

        Args:
            together: the share of other prompts that are computed in the same step.
        """
        at = moments()
        is_busy = at.busy < 1.0 - self.met[:, :1]
        # the step that an arrival falls into is longer than others: gamma of one more shape
        excess = self._excess_seconds(self.prompt_share)[:, None]
        mean = self.step[:, None] + excess
        deviation = np.sqrt(np.log1p(excess / mean))
        found = mean * np.exp(at.normal * deviation - deviation**2 / 2.0)
        expected = (self.rates * self.company)[:, None] * found
        clump = soon_after(self.arrival_cv2[:, None], expected) * self.clumping[:, None]
        others = together * self.prompt_seconds * (poisson(expected) + np.maximum(0.0, clump))
        idle_step = self.engine.step_times.seconds(num_rows=0, num_sequences=0, num_context_tokens=0)
        steps_beside = self.met @ np.concatenate([[idle_step], self.policy.step_seconds])
        chunks = np.ceil(prompt_lengths(self.load) / self.budget)[at.length]
        own = chunks * steps_beside[:, None] + self.seconds_of_prompts[at.length]
        seconds: Floats = is_busy * (at.left * found + others) + own
        return seconds

    def icl(self) -> Lognormal:
        """Mean seconds between the messages of a stream: those of a step."""
        if self.tokens_after <= 0.0:
            return self._nothing()
        num_steps = self.seen @ self.steps
        mean = self.step + self.company_seconds / num_steps
        batch_cv2 = self._seen_variance(self.policy.step_seconds) / mean**2
        return Lognormal(mean, batch_cv2 + self._stall_cv2(mean * num_steps))

    def tpot(self, tokens_after: float) -> Lognormal:
        """Mean seconds per token after the first, of answers with so many."""
        if self.tokens_after <= 0.0:
            return self._nothing()
        per_token = self.policy.step_seconds * self.policy.steps_for(tokens_after) / tokens_after
        mean = self._seen_mean(per_token) + self.company_seconds / tokens_after
        batch_cv2 = self._seen_variance(per_token) / mean**2
        luck = self.seen @ (self.policy.variance_of_tokens / self.policy.tokens_per_step) / tokens_after
        spread = luck + self.policy.request_cv**2
        return Lognormal(mean, batch_cv2 + self._stall_cv2(mean * tokens_after) + spread)

    def _stall_cv2(self, life: Floats) -> Floats:
        """What the prompts add that others bring during a request's life, and those that came with its own."""
        clumps = self.arrival_cv2 + self.prompt_cv2
        during = self.prompt_share * self.prompt_seconds * clumps * self.stretch**2 / life
        return during + (self.company_seconds / life) ** 2

    def _nothing(self) -> Lognormal:
        zeros = np.zeros_like(self.rates)
        return Lognormal(zeros, zeros)


def _averaged(departures: Floats, seen: Floats) -> Floats:
    """How much of the variance of the batch size remains in its mean over one request's life, [rates].

    The batch size returns to its mean the sooner the more departures grow with it: its correlation falls as
    exp(-x t / life), where x is the elasticity of departures by batch size, 1 where sequences do not slow each other down.
    """
    if departures.shape[1] == 1:
        return np.ones(len(departures))
    numbers = np.arange(1, departures.shape[1] + 1, dtype=np.float64)
    slopes = np.gradient(np.log(departures), np.log(numbers), axis=1)
    elasticity = np.clip((seen * slopes).sum(axis=1), LEAST_ELASTICITY, 1.0)
    averaged: Floats = 2.0 * (elasticity - 1.0 + np.exp(-elasticity)) / elasticity**2
    return averaged


def predict(
    engine: EngineModel,
    policy: ServingPolicy,
    load: Load,
    rates: Floats,
    *,
    num_engines: Floats | float = 1.0,
    routing: Routing = Routing.LEAST_REQUESTS,
) -> Prediction:
    """What an engine does with a load's requests at each of several rates of its own, [rates] per second.

    Args:
        engine: what it is.
        policy: how it is run.
        load: what requests are; its rate does not count here.
        rates: of arrivals at this engine.
        num_engines: [rates] or one for all, engines that share the arrivals.
        routing: how they share them.
    """
    rates = np.asarray(rates, dtype=np.float64)
    counts = np.broadcast_to(np.asarray(num_engines, dtype=np.float64), rates.shape)
    steady = _Steady(engine, policy, load, rates, counts, routing)
    ttft, per_token = steady.ttft(), steady.tpot(steady.tokens_after)
    after_first = steady.tokens_after * per_token.mean
    mean = ttft.mean + after_first
    variance = ttft.variance + after_first**2 * (per_token.cv2 + load.osl_cv**2)
    is_stable = steady.is_stable
    cv2 = np.where(is_stable, variance, 1.0) / np.where(is_stable, mean, 1.0) ** 2
    return Prediction(
        rates=steady.rates,
        is_stable=is_stable,
        ttft=ttft,
        # what an answer has once, its few tokens share: over all answers that is the mean of 1 / tokens
        tpot=steady.tpot(1.0 / float(np.mean(1.0 / tokens_after_first(load)))),
        icl=steady.icl(),
        e2el=Lognormal(mean, cv2),
        batch_size=steady.batch_size,
        acceptance_length=steady.seen @ policy.tokens_per_step,
        utilization=steady.utilization,
        busy_share=1.0 - steady.share[:, 0],
        prompt_share=steady.prompt_share,
        wait_chance=steady.wait_chance,
    )


def max_rate(
    engine: EngineModel,
    policy: ServingPolicy,
    load: Load,
    sla: Sla,
    *,
    num_engines: int = 1,
    routing: Routing = Routing.LEAST_REQUESTS,
) -> float:
    """The most requests per second and engine at which so many engines attain the SLA; 0: not even when idle.

    Found on grids of rates, each within the interval of the one before, as a bisection into 32 parts would.
    """
    residence = policy.step_seconds * np.maximum(1.0, policy.steps_for(load.osl - 1.0))
    low, high = 0.0, float(np.max(np.arange(1, policy.max_num_seqs + 1) / residence))
    for _ in range(RATE_ROUNDS):
        rates = np.linspace(low, high, RATE_GRID)[1:]
        found = predict(engine, policy, load, rates, num_engines=num_engines, routing=routing)
        fails = found.attainment(sla) < sla.attainment
        if not fails.any():
            return high
        first = int(np.argmax(fails))
        low, high = (low if first == 0 else float(rates[first - 1])), float(rates[first])
    return low
