"""Fleets whose engines start and drain while they serve."""

from __future__ import annotations

import pytest

from forerun.engine.simulation import SimulationSettings
from forerun.errors import ConfigError
from forerun.plan.load import Load
from forerun.plan.simulation.fleet import Fleet, FleetChange, Transfer
from forerun.plan.simulation.requests import SimulatedRequest, synthetic_requests
from forerun.plan.simulation.simulate import simulate

ENGINE = SimulationSettings()


def arriving(*times, output=20, **changes):
    return [SimulatedRequest(arrival=time, num_prompt_tokens=40, num_output_tokens=output, **changes) for time in times]


def replicas_of(result):
    return [one.replica for one in result.requests]


def test_a_new_engine_takes_requests_from_its_start_on():
    requests = arriving(0.0, 1.0, 2.0, 3.0)
    fleet = Fleet(replicas=1, changes=(FleetChange(at=2.0, replicas=2),))
    result = simulate(ENGINE, requests, fleet=fleet)
    assert replicas_of(result) == [0, 0, 1, 0]
    assert [(one.start, one.stop) for one in result.lifetimes] == [(0.0, None), (2.0, None)]


def test_an_engine_that_is_given_up_ends_what_it_has_and_gets_no_more():
    requests = arriving(0.0, 0.01, 0.05, 0.06, output=100)
    fleet = Fleet(replicas=2, routing="round-robin", changes=(FleetChange(at=0.02, replicas=1),))
    result = simulate(ENGINE, requests, fleet=fleet)
    assert replicas_of(result) == [0, 1, 0, 0]
    drained = result.requests[1]
    assert result.lifetimes[1].stop == drained.finished > 0.02
    assert len(result.steps[1].ends) == drained.num_chunks
    until = result.requests[-1].finished
    assert result.engine_seconds(since=0.0, until=until) == pytest.approx(until + drained.finished)


def test_the_least_busy_engine_is_given_up_and_at_once_where_it_has_nothing():
    requests = arriving(0.0, 0.1, output=100)
    fleet = Fleet(replicas=3, routing="least-requests", changes=(FleetChange(at=0.2, replicas=2),))
    result = simulate(ENGINE, requests, fleet=fleet)
    assert replicas_of(result) == [0, 1]
    assert [one.stop for one in result.lifetimes] == [None, None, 0.2]


def test_a_draining_engine_takes_requests_again_before_a_new_one_starts():
    changes = (
        FleetChange(at=0.02, replicas=1),
        FleetChange(at=0.04, replicas=2),
        FleetChange(at=5.0, replicas=1),
        FleetChange(at=6.0, replicas=2),
    )
    requests = [*arriving(0.0, 0.01, 0.05, 0.06, output=100), *arriving(7.0, 7.01)]
    result = simulate(ENGINE, requests, fleet=Fleet(replicas=2, routing="least-requests", changes=changes))
    assert replicas_of(result) == [0, 1, 0, 1, 0, 2]
    assert [(one.start, one.stop) for one in result.lifetimes] == [(0.0, None), (0.0, 5.0), (6.0, None)]


def test_a_new_engine_has_nothing_in_its_prefix_cache():
    same = {"piece_hashes": (1,), "piece_size": 32}
    requests = arriving(0.0, 1.0, 3.0, **same)
    fleet = Fleet(changes=(FleetChange(at=1.5, replicas=2),), routing="round-robin")
    result = simulate(ENGINE, requests, fleet=fleet)
    assert replicas_of(result) == [0, 0, 1]
    assert [one.num_cached_tokens for one in result.requests] == [0, 32, 0]


def test_engines_that_read_prompts_change_apart():
    requests = synthetic_requests(Load(rate=20, isl=60, osl=10), 60, seed=1)
    changes = (
        FleetChange(at=1.0, replicas=1, prefill_replicas=2),
        FleetChange(at=2.0, replicas=2, prefill_replicas=1),
    )
    fleet = Fleet(replicas=2, prefill_replicas=1, transfer=Transfer(seconds=0.01), changes=changes)
    result = simulate(ENGINE, requests, fleet=fleet)
    assert [one.kind for one in result.replicas] == ["decode"] * len(result.lifetimes[:-2]) + ["prefill"] * 2
    assert all(one.finished > one.first_token for one in result.requests)
    for life, log in zip(result.lifetimes, result.steps, strict=True):
        assert not log.ends or life.stop is None or log.ends[-1] <= life.stop


def test_changes_that_are_none_change_nothing():
    requests = synthetic_requests(Load(rate=30, isl=60, osl=30), 80, seed=2)
    same = tuple(FleetChange(at=at, replicas=2) for at in (0.0, 0.5, 0.5, 100.0))
    plain, changed = (
        simulate(ENGINE, requests, fleet=Fleet(replicas=2, routing="least-requests", changes=changes))
        for changes in ((), same)
    )
    assert plain.requests == changed.requests
    assert plain.lifetimes == changed.lifetimes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ((FleetChange(at=1.0, replicas=0),), "replicas: got 0"),
        ((FleetChange(at=1.0, replicas=1, prefill_replicas=1),), "apart always or never"),
        ((FleetChange(at=2.0, replicas=1), FleetChange(at=1.0, replicas=1)), "got one at 1 s after 2 s"),
        ((FleetChange(at=-1.0, replicas=1),), "sorted by time"),
    ],
)
def test_changes_that_cannot_be_are_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        Fleet(changes=changes)
