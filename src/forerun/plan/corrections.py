"""What is learnt from a running service: how far its step times and its acceptance are off the profile, each apart.

Dynamo's planner has one factor for decoding, observed over predicted inter-token latency. With speculation that
mixes two causes with different cures: slower steps are seen at every K, fewer accepted tokens argue for a smaller K.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from forerun.errors import ConfigError
from forerun.plan.acceptance import AcceptanceProfile

WEIGHT = 0.3
"""Of an interval's ratio in the running mean."""

LEAST, MOST = 0.5, 2.0
"""Factors outside say that the profile is of something else; they are not applied, and it is said."""

LEAST_DRAFTED, MOST_DRAFTED = 0.0, 5.0
"""The same of the drafted tokens that stand, which differ more, from text to text: drafts may add nothing at all."""

FEWEST_STEPS = 20  # of an interval that teaches anything: an idle or a cold service does not


@dataclass(slots=True)
class CorrectionFactor:
    """A running ratio of what was observed over what was predicted; 1 before the first observation."""

    name: str
    value: float = 1.0
    num_observations: int = 0
    least: float = LEAST
    most: float = MOST

    def observe(self, *, observed: float, predicted: float, num_steps: int) -> None:
        """Learn from an interval; one with fewer than 20 steps teaches nothing.

        Raises:
            ConfigError: a value is not a finite number above 0, or at least 0 where nothing may be observed.
        """
        if num_steps < FEWEST_STEPS:
            return
        self._check("observed", observed, may_be_0=self.least == 0.0)
        self._check("predicted", predicted, may_be_0=False)
        ratio = observed / predicted
        weight = 1.0 if self.num_observations == 0 else WEIGHT
        self.value += weight * (ratio - self.value)
        self.num_observations += 1

    def _check(self, what: str, value: float, *, may_be_0: bool) -> None:
        """Refuse what no service can have shown, or no profile can say."""
        if not (0.0 < value < math.inf or (may_be_0 and value == 0.0)):
            may_be = "at least 0" if may_be_0 else "above 0"
            raise ConfigError(
                f"correction of {self.name}: got {what} {value!r}; must be a finite number {may_be}: profile again, or "
                "leave this interval out"
            )

    def checked(self) -> float:
        """The factor.

        Raises:
            ConfigError: it is so far from 1 that the profile must be of something else.
        """
        if not self.least <= self.value <= self.most:
            raise ConfigError(
                f"correction of {self.name}: observations are {self.value:.2f} times what the profile says; must be from "
                f"{self.least:g} to {self.most:g}: profile again, on this machine and with these prompts"
            )
        return self.value


def acceptance_factor() -> CorrectionFactor:
    """The factor of the tokens that drafts add to a step: all that it yields but the target's own one."""
    return CorrectionFactor("drafted tokens of a step", least=LEAST_DRAFTED, most=MOST_DRAFTED)


@dataclass(slots=True)
class Corrections:
    """Both factors of a service: `time` of its steps, `acceptance` of the tokens that drafts add to a step."""

    time: CorrectionFactor = field(default_factory=lambda: CorrectionFactor("step time"))
    acceptance: CorrectionFactor = field(default_factory=acceptance_factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedCorrections:
    """The factors that a profile was corrected with, and the load tests that they were learnt from, if they were."""

    time_factor: float = 1.0
    acceptance_factor: float = 1.0
    learnt_from: tuple[str, ...] = ()

    @property
    def changes_nothing(self) -> bool:
        """Whether the profile is taken as it was measured, and nothing was compared."""
        return self.time_factor == self.acceptance_factor == 1.0 and not self.learnt_from

    def to_json(self) -> dict[str, Any]:
        """The record as JSON."""
        return {
            "time_factor": self.time_factor,
            "acceptance_factor": self.acceptance_factor,
            "learnt_from": list(self.learnt_from),
        }


NO_CORRECTIONS = AppliedCorrections()


def with_drafted(profile: AcceptanceProfile, factor: float) -> AcceptanceProfile:
    """The profile where drafts add `factor` times as many tokens to a step, or as many as they can.

    They can add one for each place before the first that never stands. One factor so fits all configurations and
    classes of prompts, however much each adds.

    Raises:
        ConfigError: the factor is below 0.
    """
    rates = profile.conditional
    reachable = next((place for place, rate in enumerate(rates) if rate == 0.0), len(rates))
    return with_length(profile, 1.0 + min(factor * (profile.mean_accept_length - 1.0), reachable))


def with_length(profile: AcceptanceProfile, length: float) -> AcceptanceProfile:
    """The profile with all rates changed by one factor, so that the longest draft yields `length` tokens per step.

    A rate is 1 at most, so the factor of the others may have to be larger; nothing is counted any more.

    Raises:
        ConfigError: no draft of so many places yields that.
    """
    places = len(profile.conditional)
    if not 1.0 <= length <= places + 1.0:
        raise ConfigError(
            f"acceptance of {profile.method}: got a mean length of {length:g} tokens per step; must be from 1 to {places + 1}"
        )

    def scaled(factor: float) -> AcceptanceProfile:
        rates = tuple(min(1.0, rate * factor) for rate in profile.conditional)
        return AcceptanceProfile(
            method=profile.method, conditional=rates, proposed=profile.proposed, mean_nodes=profile.mean_nodes
        )

    low, high = 0.0, 1.0
    while scaled(high).mean_accept_length < length and high < 1e6:
        high *= 2.0
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if scaled(middle).mean_accept_length < length else (low, middle)
    found = scaled(high)
    if abs(found.mean_accept_length - length) > 1e-6 * length:
        raise ConfigError(
            f"acceptance of {profile.method}: no change of its rates yields {length:g} tokens per step, as some places "
            "never stand; profile again, with these prompts"
        )
    return found
