"""Learns corrections of a profile from a load test of a service: the same requests are simulated, and both are compared.

A load test at a known load says when requests were sent, how long they were, when their tokens came, and, by the server's
counters, how many of these were drafted. Drafted tokens per step compare acceptance, whatever a step takes; seconds per
step compare times, whatever a step yields.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.core.finite_numbers import is_number
from forerun.core.integers import is_integer
from forerun.errors import ConfigError, did_you_mean
from forerun.plan.corrections import FEWEST_STEPS, LEAST, MOST, AppliedCorrections, Corrections
from forerun.plan.deployment_planner import corrected
from forerun.plan.load_test_file import read_load_test_file
from forerun.plan.profile import PLAIN, Profile
from forerun.plan.simulation.profiled import profiled_engine
from forerun.plan.simulation.requests import SimulatedRequest
from forerun.plan.simulation.result import SimulationResult

ARRAYS = ("start_times", "input_lens", "output_lens", "ttfts", "itls")
DRAFTED = "spec_decode_draft_tokens"
ACCEPTED = "spec_decode_accepted_tokens"
ROUNDS = 6  # of halving the interval of the time factor, in logarithms: then it is 2 % wide, and interpolated
TOLERANCE = 0.002  # of the time per step, at which a factor is found


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFigures:
    """What a service's steps took and yielded, over all its requests; simulated or observed."""

    decode_seconds: float  # of all requests, from their first token to their last
    num_decoded: int  # tokens after each request's first
    num_accepted: int  # drafted ones among them

    @property
    def num_steps(self) -> int:
        """Steps of all sequences after their first tokens."""
        return self.num_decoded - self.num_accepted

    @property
    def drafted_per_step(self) -> float:
        """Mean drafted tokens that stood in a sequence's step."""
        return self.num_accepted / self.num_steps

    @property
    def step_seconds(self) -> float:
        """Mean seconds from one step of a sequence to its next."""
        return self.decode_seconds / self.num_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTest:
    """A load test of a service: its requests as they were sent, and its figures.

    `has_drafts` is whether the service drafted; of its drafts none may have stood.
    """

    name: str
    requests: list[SimulatedRequest]
    figures: ServiceFigures
    has_drafts: bool


def read_load_test(path: Path) -> LoadTest:
    """Read the result of `forerun bench serve` or `vllm bench serve` with --save-detailed.

    Raises:
        ConfigError: see `read_load_test_file`; or a time, a length or the server's count of drafts cannot be.
    """
    saved = read_load_test_file(path, *ARRAYS)
    counts = {name: saved.content.get(name) or 0 for name in (DRAFTED, ACCEPTED)}
    for name, count in counts.items():
        if not is_integer(count):
            raise ConfigError(f"{path}: got {name}={count!r:.60}; must be a whole number: save the load test anew")
    return _load_test(path, saved.requests, counts[ACCEPTED], has_drafts=any(counts.values()))


def _load_test(path: Path, records: Sequence[tuple[Any, ...]], num_accepted: int, *, has_drafts: bool) -> LoadTest:
    sent, seconds, num_decoded = [], 0.0, 0
    for number, (start, num_prompt, num_output, ttft, itls) in enumerate(records):
        gaps = itls if isinstance(itls, list) else [itls]
        numbers = (start, num_prompt, num_output, ttft, *gaps)
        if not all(is_number(one) and one >= 0 for one in numbers):
            raise ConfigError(f"{path}, request {number} (from 0): has a time or a length that is no number from 0 up")
        if not all(isinstance(one, int) for one in (num_prompt, num_output)) or num_prompt < 1 or num_output < 1:
            raise ConfigError(
                f"{path}, request {number} (from 0): got {num_prompt} prompt and {num_output} output tokens; each must be a "
                "whole number, 1 or more"
            )
        sent.append((float(start), int(num_prompt), int(num_output)))
        seconds += sum(gaps)
        num_decoded += int(num_output) - 1
    if not 0 <= num_accepted < num_decoded:
        raise ConfigError(
            f"{path}: has {num_decoded} tokens after the first ones, {num_accepted} of them drafted; a correction needs answers "
            "of several tokens, in steps: test with longer answers"
        )
    if num_decoded - num_accepted < FEWEST_STEPS:
        raise ConfigError(
            f"{path}: has {num_decoded - num_accepted} steps of decoding; must be {FEWEST_STEPS} at least: test with more requests"
        )
    first = min(sent)[0]
    requests = [
        SimulatedRequest(arrival=start - first, num_prompt_tokens=num_prompt, num_output_tokens=num_output)
        for start, num_prompt, num_output in sorted(sent)
    ]
    figures = ServiceFigures(decode_seconds=seconds, num_decoded=num_decoded, num_accepted=num_accepted)
    return LoadTest(name=path.name, requests=requests, figures=figures, has_drafts=has_drafts)


def learn_corrections(
    profile: Profile,
    tests: Sequence[LoadTest],
    *,
    config: str | None = None,
    kind: str | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> AppliedCorrections:
    """The factors with which the profile's simulated engine shows what the service showed; of several tests a running mean.

    Args:
        profile: of the engine that was tested, alone, without a cache of these prompts.
        tests: in the order in which they were made.
        config: the configuration of the profile that the service ran; None: "plain" where it drafted nothing, else the
            only one of the profile.
        kind: class of prompts whose acceptance is compared.
        seed: of the simulations.
        progress: is told what is simulated.

    Raises:
        ConfigError: the configuration is not known, a request does not fit the profile, or a factor is
            beyond 0.5 to 2 (of times) or above 5 (of drafted tokens).
    """
    found = Corrections()
    for test in tests:
        name = _config_of(profile, test, config)
        progress(f"simulating {test.name} as profiled")
        simulated = _simulated(profile, test, name, kind, seed)
        num_steps = test.figures.num_steps
        if name != PLAIN:
            found.acceptance.observe(
                observed=test.figures.drafted_per_step, predicted=simulated.drafted_per_step, num_steps=num_steps
            )
            found.acceptance.checked()
        ratio = test.figures.drafted_per_step / simulated.drafted_per_step if name != PLAIN else 1.0
        # rates say nothing of the rows of a tree: its steps are compared as they were profiled
        has_trees = name in profile.traces and profile.trace(name).has_trees
        accepting = (
            profile if has_trees else corrected(profile, time_factor=1.0, acceptance_factor=ratio, methods=(name,))
        )
        factor = _time_factor(accepting, test, name, kind, seed, progress)
        found.time.observe(observed=factor, predicted=1.0, num_steps=num_steps)
    return AppliedCorrections(
        time_factor=found.time.checked(),
        acceptance_factor=found.acceptance.checked(),
        learnt_from=tuple(test.name for test in tests),
    )


def _config_of(profile: Profile, test: LoadTest, config: str | None) -> str:
    if config is None:
        if not test.has_drafts:
            return PLAIN
        if len(profile.configs) != 1:
            raise ConfigError(
                f"{test.name}: the service drafted, and the profile has {len(profile.configs)} configurations "
                f"({', '.join(profile.configs)}); say with --observed-config which of them it ran"
            )
        return next(iter(profile.configs))
    if config != PLAIN and config not in profile.configs:
        raise ConfigError(f"observed-config: got {config!r}{did_you_mean(config, [PLAIN, *profile.configs])}")
    if test.has_drafts != (config != PLAIN):
        counted = "counts drafts" if test.has_drafts else f"has no {DRAFTED}, the server's count of drafts"
        raise ConfigError(f"observed-config: got {config!r}, and {test.name} {counted}; name what the service ran")
    return config


def _time_factor(
    profile: Profile, test: LoadTest, name: str, kind: str | None, seed: int, progress: Callable[[str], None]
) -> float:
    """The factor of step times with which a step takes as long as observed, from 0.5 to 2; beyond these their ends' ratio."""

    def step_seconds(factor: float) -> float:
        progress(f"simulating {test.name} with {factor:.2f} times the seconds of a step")
        slower = corrected(profile, time_factor=factor, acceptance_factor=1.0)
        return _simulated(slower, test, name, kind, seed).step_seconds

    wanted = test.figures.step_seconds
    low, high = LEAST, MOST
    at_low, at_high = step_seconds(low), step_seconds(high)
    if wanted < at_low:
        return low * wanted / at_low
    if wanted > at_high:
        return high * wanted / at_high
    for _ in range(ROUNDS):
        middle = math.sqrt(low * high)
        at_middle = step_seconds(middle)
        if abs(at_middle - wanted) <= TOLERANCE * wanted:
            return middle
        if at_middle < wanted:
            low, at_low = middle, at_middle
        else:
            high, at_high = middle, at_middle
    share = math.log(wanted / at_low) / math.log(at_high / at_low) if at_high > at_low else 0.5
    return float(low * (high / low) ** share)


def _simulated(profile: Profile, test: LoadTest, name: str, kind: str | None, seed: int) -> ServiceFigures:
    return simulated_figures(profiled_engine(profile, name, kind=kind).simulate(test.requests, seed=seed))


def simulated_figures(result: SimulationResult) -> ServiceFigures:
    """The figures of a simulation."""
    return ServiceFigures(
        decode_seconds=sum(one.finished - one.first_token for one in result.requests),
        num_decoded=sum(one.num_output_tokens - 1 for one in result.requests),
        num_accepted=sum(one.num_accepted_tokens for one in result.requests),
    )
