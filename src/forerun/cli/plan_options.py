"""The options of `forerun plan`: what may be chosen, what is known of the service, what is simulated, which day is replayed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from forerun.cli.options import Flag, check_picture
from forerun.errors import ConfigError
from forerun.plan.capacity import Routing
from forerun.plan.corrections import AppliedCorrections
from forerun.plan.day_replay import DAY, DEFAULT_INTERVAL, HARMONIC
from forerun.plan.deployment_plan import Layout
from forerun.plan.deployment_planner import PlanningOptions
from forerun.plan.observed_service import learn_corrections, read_load_test
from forerun.plan.profile import PLAIN, Profile
from forerun.plan.simulation.fleet import Transfer

Layouts = Literal["aggregated", "disaggregated", "any"]

PREDICTORS = ("constant", "ar", "kalman", HARMONIC)
"""What predicts a day's intervals where the user names nothing."""

LEAST_FACTOR, MOST_FACTOR = 1e-3, 1e3
"""Of the seconds of a step: no service that runs is further from its profile."""


@dataclass(frozen=True, kw_only=True)
class CorrectionOptions:
    """What a running service shows of the profile."""

    time_factor: float = 1.0
    """Observed over profiled seconds of a step, drafting included."""
    acceptance_factor: float = 1.0
    """Observed over profiled tokens that drafts add to a step."""
    observed: Annotated[tuple[Path, ...], Parameter(negative=())] = ()
    """Learn both factors from a load test of the profiled engine, "forerun bench serve --save-result --save-detailed"; several times for several."""
    observed_config: str | None = None
    """The configuration of the profile that the tested service ran; by default the only one, or plain where it drafted nothing."""

    def __post_init__(self) -> None:
        if self.observed and (self.time_factor, self.acceptance_factor) != (1.0, 1.0):
            raise ConfigError(
                "observed: contradicts --time-factor and --acceptance-factor, which it learns; leave them out"
            )
        if not LEAST_FACTOR <= self.time_factor <= MOST_FACTOR:
            raise ConfigError(
                f"time_factor: got {self.time_factor:g}; must be from {LEAST_FACTOR:g} to {MOST_FACTOR:g}: profile on the machine that "
                "serves, or leave it out"
            )
        if self.observed_config is not None and not self.observed:
            raise ConfigError("observed_config: given without --observed; leave it out, or give a load test")

    def of(self, profile: Profile, prompt_class: str | None, progress: Callable[[str], None]) -> AppliedCorrections:
        """The factors: as given, or learnt."""
        if not self.observed:
            return AppliedCorrections(time_factor=self.time_factor, acceptance_factor=self.acceptance_factor)
        tests = [read_load_test(path) for path in self.observed]
        return learn_corrections(profile, tests, config=self.observed_config, kind=prompt_class, progress=progress)


CORRECTION = CorrectionOptions()


@dataclass(frozen=True, kw_only=True)
class ChoiceOptions:
    """What the plan may choose."""

    layout: Layouts = "aggregated"
    """aggregated: each engine serves whole requests; disaggregated: some compute prompts and hand the KV over; any: the better of both."""
    budget: int | None = None
    """GPUs or cores that all engines may take together; by default as many as it needs."""
    devices_per_engine: int | None = None
    """GPUs or cores of one engine, as profiled; by default one for each process of the profile's tensor parallelism."""
    running: int | None = None
    """Engines that run now; fewer are planned only if they stay below 80 % busy."""
    method: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    """Configurations of the profile that may be chosen, besides no speculation; by default all."""
    prompt_class: str | None = None
    """Acceptance as on the profile's prompts of this class only."""
    confidence: float | None = None
    """Plan with acceptance at the lower end of its interval, e.g. 0.9; by default as measured."""
    routing: Routing = Routing.LEAST_REQUESTS
    """Which engine a request is sent to: least-requests, that with the fewest; random: any, which is the safe side."""
    transfer_seconds: float | None = None
    """What handing over the KV of a prompt takes at least, where engines are disaggregated; by default nothing."""
    transfer_gigabytes_per_second: float | None = None
    """How much KV is handed over in a second; by default all of it."""
    correction: Annotated[CorrectionOptions, Parameter(name="*", group=Group("Correction", sort_key=2))] = CORRECTION

    def __post_init__(self) -> None:
        for name in ("budget", "devices_per_engine", "running"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: got {value}; must be 1 or more")
        if self.devices_per_engine is not None and self.budget is None:
            raise ConfigError(
                f"devices_per_engine: got {self.devices_per_engine}, and no budget is given that engines take it of; give --budget "
                "too, or leave it out"
            )
        for name in ("transfer_seconds", "transfer_gigabytes_per_second"):
            value = getattr(self, name)
            if value is not None and self.layout == "aggregated":
                raise ConfigError(
                    f"{name}: got {value:g} with --layout aggregated, where nothing is handed over; it applies to --layout "
                    "disaggregated or any: leave it out, or give one of these"
                )

    def planning(self, profile: Profile) -> PlanningOptions:
        """The same for the planner.

        Raises:
            ConfigError: the budget is less than one engine, there are no drafts to which an option applies, or the profile does
                not know the size of the KV.
        """
        acceptance_factor = self.correction.acceptance_factor
        narrowing = {
            "prompt_class": self.prompt_class,
            "confidence": self.confidence,
            "acceptance_factor": None if acceptance_factor == 1.0 else acceptance_factor,
        }
        drafters = set(self.method or profile.configs) - {PLAIN}
        for name, value in narrowing.items():
            if value is not None and not drafters:
                lacking, cure = ("--method names", "name one") if self.method else ("the profile has", "profile one")
                raise ConfigError(
                    f"{name}: got {value!r}, and {lacking} no configuration of drafts, to whose acceptance it applies; leave it out, "
                    f"or {cure}"
                )
        devices = self.devices_per_engine or profile.tensor_parallel_size
        most = None if self.budget is None else self.budget // devices
        if most == 0:
            raise ConfigError(f"budget: got {self.budget}, and one engine takes {devices}; must be at least that")
        given = self.transfer_gigabytes_per_second
        rate = float("inf") if given is None else 1e9 * given
        if rate != float("inf") and profile.kv_bytes_per_token is None:
            raise ConfigError(
                "transfer_gigabytes_per_second: the profile does not say how large the KV of a token is; give "
                "--transfer-seconds instead"
            )
        size = 0.0 if rate == float("inf") else float(profile.kv_bytes_per_token or 0)
        return PlanningOptions(
            layouts=tuple(Layout) if self.layout == "any" else (Layout(self.layout),),
            most_engines=most,
            kind=self.prompt_class,
            confidence=self.confidence,
            methods=self.method or None,
            routing=self.routing,
            transfer=Transfer(seconds=self.transfer_seconds or 0.0, bytes_per_second=rate, bytes_per_token=size),
        )


@dataclass(frozen=True, kw_only=True)
class ConfirmationOptions:
    """Whether the simulator is asked too."""

    confirm: Flag = False
    """Simulate the plan, and plan more engines where it falls short; with --replay, simulate the day under each predictor too."""
    num_requests: int | None = None
    """Requests of the plan's simulation; by default as many as fill all engines ten times, from 500 to 20,000."""
    seed: int = 0
    """Of the simulations."""

    def __post_init__(self) -> None:
        if self.num_requests is not None and self.num_requests < 1:
            raise ConfigError(f"num_requests: got {self.num_requests}; must be 1 or more")
        if self.seed < 0:
            raise ConfigError(f"seed: got {self.seed}; must be 0 or more")
        if not self.confirm and (self.num_requests is not None or self.seed):
            raise ConfigError("num_requests, seed: given without --confirm; nothing is simulated then: leave them out")


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """A day of traffic."""

    replay: Path | None = None
    """A trace: mooncake's .jsonl or that of "forerun serve --request-log", Azure's .csv, or the .json of a load test with
    --save-detailed."""
    interval: float = DEFAULT_INTERVAL
    """Seconds from one decision to the next."""
    period: float = DAY
    """Seconds after which the traffic repeats itself, for the predictor harmonic; by default a day."""
    predictor: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    """What predicts the next interval: constant, ar, kalman, harmonic, arima (pmdarima) or prophet; by default the first four."""
    picture: Path | None = None
    """Draw the day to this .png, .svg or .pdf file (needs the extra "bench")."""

    def __post_init__(self) -> None:
        check_picture("--picture", self.picture)
        is_given = {
            "interval": self.interval != DEFAULT_INTERVAL,
            "period": self.period != DAY,
            "predictor": bool(self.predictor),
            "picture": self.picture is not None,
        }
        given = [name for name, value in is_given.items() if value]
        if self.replay is None and given:
            raise ConfigError(
                f"{', '.join(given)}: given without --replay, to whose day of traffic it applies; leave it out, or give a trace"
            )
        if self.period != DAY and HARMONIC not in self.predictors:
            raise ConfigError(f"period: given without the predictor {HARMONIC}; leave it out")
        if not 0.0 < self.period < math.inf:
            raise ConfigError(f"period: got {self.period:g} s; must be above 0")

    @property
    def predictors(self) -> tuple[str, ...]:
        """Those that were given, or the usual ones."""
        return self.predictor or PREDICTORS


CHOICE, CONFIRMATION, REPLAY = ChoiceOptions(), ConfirmationOptions(), ReplayOptions()
