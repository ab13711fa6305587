"""How many replicas the next interval needs, by the planner that `forerun plan` asks: measured load in, decision out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from forerun.deploy.ray.load_meter import MeasuredInterval
from forerun.plan.corrections import acceptance_factor
from forerun.plan.day_replay import DAY, LoadForecast, scale_down_load
from forerun.plan.deployment_planner import (
    DEFAULTS,
    PlanningOptions,
    corrected,
    engine_model,
    plan_engines,
    speculative_config,
)
from forerun.plan.fleet_plan import FREE_TRANSFER, FleetPlan, FleetSearch, kept_engines
from forerun.plan.load import Load
from forerun.plan.predictors import make_predictor
from forerun.plan.profile import Profile
from forerun.plan.sla import Sla

ROUNDING = 1e-9
"""Tokens that drafts add to a step by a plan: fewer are what sums of shares leave of none."""


@dataclass(frozen=True, kw_only=True)
class ScalingDecision:
    """What to run in the next interval.

    `plan` says how each engine would be run at that load, its draft lengths too; engines that choose those themselves
    need not be told. `forecast` and `plan` are None where nothing is expected, or known yet.
    """

    replicas: int
    forecast: Load | None = None
    plan: FleetPlan | None = None

    def to_json(self) -> dict[str, Any]:
        """The decision in words and numbers, for logs."""
        return {
            "replicas": self.replicas,
            "forecast": None if self.forecast is None else self.forecast.to_json(),
            "attainment": None if self.plan is None else self.plan.attainment,
            "speculative_config": None if self.plan is None else speculative_config(self.plan),
        }


class SlaScaler:
    """Decides interval by interval.

    A new count is what the planner says for the predicted load. Replicas are given up only where those that remain
    stay below 80 % busy, as `forerun plan --running` has it, by the predicted load or, where that is more, by the rate
    that was measured last. Tokens that drafts add to a step are compared with the profile's, and the planner is told
    the ratio; where it plans no drafts, with those that it planned last.

    Args:
        profile: of one engine.
        sla: what requests are promised.
        least: replicas that there always are.
        most: replicas that there may be.
        predictor: of the next interval's load, by name.
        interval: seconds from one decision to the next.
        options: of the planner; `most` bounds its engines.

    Raises:
        ConfigError: there is no such predictor.
    """

    def __init__(
        self,
        profile: Profile,
        sla: Sla,
        *,
        least: int = 1,
        most: int,
        predictor: str = "kalman",
        interval: float,
        options: PlanningOptions = DEFAULTS,
    ) -> None:
        self._profile, self._sla = profile, sla
        self._least, self._most = least, most
        self._options = replace(options, most_engines=most)
        period = max(2, round(DAY / interval))
        self._forecast = LoadForecast(lambda: make_predictor(predictor, period=period), longest=profile.max_model_len)
        self._acceptance = acceptance_factor()
        self._profiled: float | None = None  # tokens that drafts add to a step by the profile; None: not planned yet

    def decide(self, measured: MeasuredInterval, *, running: int) -> ScalingDecision:
        """Note an interval, and say what the next one needs.

        Raises:
            ConfigError: the load does not fit the profile's engine, or acceptance is far from the profile's.
        """
        self._forecast.add(measured.load)
        if measured.tokens_per_step is not None and self._profiled is not None:
            self._acceptance.observe(
                observed=measured.tokens_per_step - 1.0, predicted=self._profiled, num_steps=measured.num_steps
            )
        load = self._forecast.predict()
        if load is None:
            return ScalingDecision(replicas=self._least)
        factor = self._acceptance.checked()
        profile = corrected(self._profile, time_factor=1.0, acceptance_factor=factor)
        answer = plan_engines(profile, load, self._sla, self._options)
        added = answer.plan.acceptance_length - 1.0
        if added > ROUNDING:
            self._profiled = added / factor
        present = scale_down_load(load, measured.load)
        count = kept_engines(
            answer.plan.replicas,
            running=running,
            busy_share=lambda number: self._with_count(profile, present, answer.plan, number).utilization,
        )
        count = min(max(count, self._least), self._most)
        return ScalingDecision(replicas=count, forecast=load, plan=self._with_count(profile, load, answer.plan, count))

    def _with_count(self, profile: Profile, load: Load, planned: FleetPlan, count: int) -> FleetPlan:
        """The same way to run each engine, with another number of them."""
        search = FleetSearch(engine_model(profile), load, self._sla, FREE_TRANSFER, self._options.routing)
        return search.at(planned.policy, 0, count)
