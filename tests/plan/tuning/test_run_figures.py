"""Figures of a run, from the times of its requests."""

from __future__ import annotations

import json

import pytest

from forerun.plan.sla import Sla
from forerun.plan.tuning.run_figures import RequestTimes, RunFigures

FAST = RequestTimes(ttft=0.1, e2el=1.1, num_tokens=11, num_chunks=6)
SLOW = RequestTimes(ttft=0.5, e2el=4.5, num_tokens=21, num_chunks=21)


def test_time_per_token_leaves_out_the_first_and_time_per_message_counts_messages():
    assert pytest.approx(0.1) == FAST.tpot
    assert pytest.approx(0.2) == FAST.icl


def test_an_answer_of_one_token_meets_any_limit_on_later_tokens():
    one = RequestTimes(ttft=0.1, e2el=0.1, num_tokens=1, num_chunks=1)
    assert (one.tpot, one.icl) == (0.0, 0.0)


def test_an_answer_of_one_token_has_no_part_in_times_per_token():
    one = RequestTimes(ttft=0.1, e2el=0.1, num_tokens=1, num_chunks=1)
    found = RunFigures.of([one, FAST], 2.0)
    assert (found.tpot.mean, found.tpot.p50, found.icl.mean) == pytest.approx((0.1, 0.1, 0.2))
    assert RunFigures.of([one], 2.0).tpot.mean == 0.0


def test_throughput_goodput_and_energy_are_of_all_requests():
    found = RunFigures.of([FAST, SLOW], 4.0, sla=Sla(tpot=0.15), joules=64.0)
    assert found.tokens_per_second == 8.0
    assert found.attainment == 0.5
    assert found.goodput == 0.25
    assert found.joules_per_token == 2.0


def test_without_goals_there_is_no_goodput_and_without_a_counter_no_energy():
    found = RunFigures.of([FAST], 1.0)
    assert found.goodput is None
    assert found.joules_per_token is None


def test_json_brings_back_the_same_figures():
    found = RunFigures.of([FAST, SLOW], 4.0, sla=Sla(ttft=0.2), joules=3.0, acceptance_length=2.0)
    again = RunFigures.from_json(json.loads(json.dumps(found.to_json())))
    assert again.e2el.p95 == pytest.approx(found.e2el.p95)
    assert (again.attainment, again.joules, again.seconds) == (found.attainment, found.joules, found.seconds)
    assert again.to_json().keys() == found.to_json().keys()
