"""Days in the simulator: where they agree with the formulas, and what the formulas do not see."""

from __future__ import annotations

import numpy as np
import pytest

from forerun.plan import day_confirmation
from forerun.plan.day_confirmation import confirmed_days, fleet_of
from forerun.plan.day_plan import DayPlan
from forerun.plan.day_replay import MEAN, ORACLE, PEAK, DayReplay, Interval, intervals_of, replay_day
from forerun.plan.deployment_planner import DEFAULTS, PlanningOptions, engine_model, plan_deployment
from forerun.plan.fleet_plan import FleetPlan
from forerun.plan.load import Load
from forerun.plan.profile import Profile
from forerun.plan.simulation.arrivals import ArrivalPattern
from forerun.plan.simulation.fleet import FleetChange
from forerun.plan.simulation.requests import SimulatedRequest, synthetic_requests, with_arrivals
from forerun.plan.sla import Sla
from tests.plan.profiles import fake_profile

SECONDS = 30.0
SLA = Sla(ttft=0.5, tpot=0.02)
PLAIN = PlanningOptions(methods=())


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return fake_profile(tmp_path_factory.mktemp("profile"))


@pytest.fixture(scope="module")
def plan(profile: Profile) -> FleetPlan:
    return plan_deployment(profile, Load(rate=20, isl=200, osl=60), SLA, PLAIN)[1].plan


def traffic(*rates: float) -> list[SimulatedRequest]:
    """Requests at a rate for each interval, at random times."""
    pattern = ArrivalPattern(durations=(SECONDS,) * len(rates), rates=rates)
    count = round(SECONDS * sum(rates))
    return synthetic_requests(Load(rate=1, isl=200, osl=60), count, seed=4, pattern=pattern)


def squeezed(requests: list[SimulatedRequest], number: int, share: float) -> list[SimulatedRequest]:
    """The same, but those of one interval come in the first share of it."""
    times = np.array([one.arrival for one in requests])
    inside = (times >= number * SECONDS) & (times < (number + 1) * SECONDS)
    times[inside] = number * SECONDS + share * (times[inside] - number * SECONDS)
    return with_arrivals(requests, times)


def by_oracle(profile: Profile, plan: FleetPlan, intervals: list[Interval]) -> DayPlan:
    replay = DayReplay(engine_model(profile), plan.policy, SLA, transfer=DEFAULTS.transfer)
    return replay.run(ORACLE, intervals, [one.load for one in intervals], steadily=False)


def simulated(profile: Profile, plan: FleetPlan, requests: list[SimulatedRequest], *, seed: int = 0) -> DayPlan:
    day = by_oracle(profile, plan, intervals_of(requests, SECONDS))
    (found,) = confirmed_days(profile, plan, [day], requests, SLA, PLAIN, seed=seed)
    return found


def test_on_a_calm_day_simulator_and_formulas_agree(profile: Profile, plan: FleetPlan) -> None:
    day = simulated(profile, plan, traffic(10, 24, 24, 10))
    assert day.num_changes == 2
    assert day.simulated is not None
    assert day.simulated.attainment == pytest.approx(day.attainment, abs=0.03)
    assert day.simulated.worst >= SLA.attainment - 0.03
    # engines that are given up are there until they have drained
    assert day.engine_hours <= day.simulated.engine_hours <= 1.05 * day.engine_hours
    assert sum(day.simulated.num_requests) == sum(one.num_requests for one in day.intervals)


def test_a_burst_inside_an_interval_shows_in_the_simulator_only(profile: Profile, plan: FleetPlan) -> None:
    calm = traffic(10, 24, 24, 10)
    day = simulated(profile, plan, squeezed(calm, 2, 0.2))
    assert day.simulated is not None
    assert day.attainment >= SLA.attainment
    assert day.simulated.attainment < day.attainment - 0.1
    shares = [kept / count for kept, count in zip(day.simulated.attained, day.simulated.num_requests, strict=True)]
    assert day.simulated.worst == shares[2] == min(shares)


def test_the_same_seed_gives_the_same_day(profile: Profile) -> None:
    """With drafts, as only these are random."""
    load = Load(rate=10, isl=200, osl=60)
    plan = plan_deployment(profile, load, SLA, PlanningOptions(methods=("suffix",)))[1].plan
    requests = traffic(3, 5)
    once, again = (simulated(profile, plan, requests, seed=7) for _ in range(2))
    assert once == again
    assert once.simulated is not None
    assert once.simulated.seed == 7


def test_days_with_the_same_engines_are_simulated_once(
    profile: Profile, plan: FleetPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    real = day_confirmation.planned_engine

    class Counting:
        def simulate(self, requests, **options):
            made.append(options["fleet"])
            return real(profile, plan).simulate(requests, **options)

    monkeypatch.setattr(day_confirmation, "planned_engine", lambda *_: Counting())
    requests = traffic(4, 4, 4)
    replay = DayReplay(engine_model(profile), plan.policy, SLA, transfer=DEFAULTS.transfer)
    days = replay_day(replay, intervals_of(requests, SECONDS), ["constant"])
    said: list[str] = []
    found = confirmed_days(profile, plan, days, requests, SLA, PLAIN, progress=said.append)
    assert [one.name for one in found] == ["constant", ORACLE, PEAK, MEAN]
    assert len(made) == len({fleet_of(one) for one in days}) < len(days)
    assert all(one.simulated is not None for one in found)
    assert said[-1].endswith(f"{len(requests)} of {len(requests)} requests")


def test_engines_of_both_kinds_change_where_it_was_decided(profile: Profile, plan: FleetPlan) -> None:
    requests = traffic(6, 24, 24)
    replay = DayReplay(engine_model(profile), plan.policy, SLA, prefill_share=0.4, transfer=DEFAULTS.transfer)
    intervals = intervals_of(requests, SECONDS)
    day = replay.run(ORACLE, intervals, [one.load for one in intervals], steadily=False)
    fleet = fleet_of(day)
    first, second, _ = day.intervals
    assert (fleet.prefill_replicas, fleet.replicas) == (first.prefill_engines, first.engines - first.prefill_engines)
    assert fleet.changes[0] == FleetChange(
        at=SECONDS, replicas=second.engines - second.prefill_engines, prefill_replicas=second.prefill_engines
    )
    (found,) = confirmed_days(profile, plan, [day], requests, SLA, PLAIN)
    assert found.simulated is not None
    assert found.simulated.attainment > 0.9
