"""Ray Serve's side of scaling: a custom autoscaling policy that asks `SlaScaler`.

Ray's controller calls it ten times a second and copies the class by value, so what computes lives in other modules.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from forerun.deploy.ray.load_meter import COUNTERS, LoadMeter, MeasuredInterval, ReplicaCounts
from forerun.deploy.ray.sla_scaler import ScalingDecision, SlaScaler
from forerun.errors import ConfigError
from forerun.plan.deployment_planner import PlanningOptions
from forerun.plan.profile import Profile
from forerun.plan.sla import parse_sla


class PlannerPolicy:
    """Measures the load of each interval, and plans the next one in a thread: the controller never waits.

    The first interval is not planned by: replicas may have lived before this policy, which a controller that starts
    again makes anew.

    Args:
        profile: the folder of `forerun profile`, on the machine of the controller.
        sla: as `forerun plan --sla` takes it.
        interval: seconds from one decision to the next.
        predictor: of the next interval's load, by name.
        methods: the configurations of the profile that the replicas may be of; none: they draft nothing.

    Raises:
        ConfigError: the profile, the SLA or the predictor cannot be used.
    """

    def __init__(self, profile: str, sla: str, interval: float, predictor: str, methods: Sequence[str]) -> None:
        self._profile, self._sla = Profile.load(Path(profile)), parse_sla(sla)
        self._interval, self._predictor = interval, predictor
        self._options = PlanningOptions(methods=tuple(methods))
        self._scaler: SlaScaler | None = None  # made at the first call, which knows the limits
        self._meter = LoadMeter()
        self._since: float | None = None
        self._is_counting = False
        self._planning: Future[ScalingDecision] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forerun-planner")
        self._target: int | None = None
        self._said: dict[str, Any] = {}

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """How many replicas there should be, and what the last decision was made of (see Ray's AutoscalingContext)."""
        now = time.monotonic()
        self._meter.take(counts_by_replica(context.raw_metrics or {}))
        if self._since is None:
            self._since = now
        elif now - self._since >= self._interval and self._planning is None:
            measured = self._meter.interval(now - self._since)
            self._since = now
            if self._is_counting:
                self._plan(measured, context)
            self._is_counting = True  # what is first heard of a replica is of its whole life: where later counts begin
        if self._planning is not None and self._planning.done():
            planning, self._planning = self._planning, None
            self._take(planning)
        return self._target or context.target_num_replicas, dict(self._said)

    def _plan(self, measured: MeasuredInterval, context: Any) -> None:
        if self._scaler is None:
            self._scaler = SlaScaler(
                self._profile,
                self._sla,
                least=max(1, context.capacity_adjusted_min_replicas),
                most=context.capacity_adjusted_max_replicas,
                predictor=self._predictor,
                interval=self._interval,
                options=self._options,
            )
        self._planning = self._thread.submit(self._scaler.decide, measured, running=context.target_num_replicas)

    def _take(self, planning: Future[ScalingDecision]) -> None:
        try:
            decision = planning.result()
        except ConfigError as error:  # of the load, which may be another in the next interval
            logging.getLogger("ray.serve").warning("forerun's planner keeps the number of replicas: %s", error)
            self._said = {"error": str(error)}
            return
        # raised again, any other would keep Ray's controller from all that it does for any application
        except Exception as error:
            logging.getLogger("ray.serve").exception("forerun's planner failed; the number of replicas stays")
            self._said = {"error": f"{type(error).__name__}: {error}"}
            return
        self._target = decision.replicas
        self._said = decision.to_json()
        logging.getLogger("ray.serve").info("forerun's planner: %s", self._said)


def counts_by_replica(raw: Any) -> dict[str, ReplicaCounts]:
    """The newest counters of each replica that has told any, from Ray's series by metric and replica."""
    stats: dict[str, dict[str, float]] = {}
    for name in COUNTERS & raw.keys():  # the others are Ray's own
        for replica, series in raw[name].items():
            if series:
                stats.setdefault(str(replica), {})[name] = series[-1].value
    return {replica: ReplicaCounts.from_stats(one) for replica, one in stats.items()}
