"""From counters of replicas to the load of an interval."""

from __future__ import annotations

import pytest

from forerun.deploy.ray.load_meter import LoadMeter, ReplicaCounts, counts_of
from forerun.engine.stats import Counter, Gauge
from forerun.server.metrics import EndedCompletions


def counts(finished, underway=0, prompt=100, answer=50, **others):
    return ReplicaCounts(
        finished=finished, underway=underway, prompt_tokens=prompt * finished, answer_tokens=answer * finished, **others
    )


def test_a_load_is_what_ended_and_what_came_to_be_under_way():
    meter = LoadMeter()
    meter.take({"a": counts(20, underway=4), "b": counts(30, underway=6)})
    load = meter.interval(10.0).load
    assert (load.rate, load.isl, load.osl) == (6.0, 100.0, 50.0)
    meter.take({"a": counts(24), "b": counts(36)})
    assert meter.interval(10.0).load is None  # the ten that ended had arrived before


def test_a_replica_that_comes_is_counted_from_its_start_and_one_that_is_gone_no_more():
    meter = LoadMeter()
    meter.take({"a": counts(10, underway=5)})
    meter.interval(1.0)
    meter.take({"a": counts(20, underway=5), "b": counts(10)})
    meter.take({"b": counts(20)})
    assert meter.interval(10.0).load.rate == pytest.approx(2.5)  # ten and twenty, and the five that are lost


def test_a_replica_that_is_silent_for_a_while_is_not_counted_twice():
    meter = LoadMeter()
    meter.take({"a": counts(100)})
    meter.interval(1.0)
    meter.take({})
    meter.take({"a": counts(110)})
    assert meter.interval(1.0).load.rate == 10.0


@pytest.mark.parametrize("fallen", [ReplicaCounts(), counts(1200, underway=20, answer=0)])
def test_counters_that_fall_are_not_believed_and_what_came_is_counted_when_they_have_grown_again(fallen):
    meter = LoadMeter()
    rates = []
    for number in range(1, 5):
        a = fallen if number == 2 else counts(600 * number)
        meter.take({"a": a, "b": counts(600 * number)})
        load = meter.interval(60.0).load
        assert (load.isl, load.osl) == (100.0, 50.0)
        rates.append(load.rate)
    assert rates == [20.0, 10.0, 30.0, 20.0]


def test_a_replica_that_starts_again_is_another_whose_counters_begin_at_zero():
    meter = LoadMeter()
    meter.take({"a": counts(1000, underway=20)})
    meter.interval(1.0)
    meter.take({"a": ReplicaCounts()})
    meter.take({"b": counts(0)})
    meter.take({"b": counts(50, underway=10)})
    assert meter.interval(10.0).load.rate == 4.0  # fifty and ten, less the twenty that ended with the first


def test_few_requests_say_nothing_of_lengths():
    meter = LoadMeter()
    meter.take({"a": counts(10)})
    meter.interval(1.0)
    meter.take({"a": counts(12, prompt=1000)})
    assert meter.interval(1.0).load.isl == 100.0


def test_a_service_that_ends_few_requests_in_an_interval_is_known_by_those_of_several():
    meter = LoadMeter()
    loads = []
    for number in range(1, 4):
        meter.take({"a": counts(2 * number, underway=10 * number)})
        loads.append(meter.interval(60.0).load)
    assert loads[:2] == [None, None]
    assert (loads[2].rate, loads[2].isl, loads[2].osl) == (0.2, 100.0, 50.0)


def test_without_any_length_nothing_is_known():
    meter = LoadMeter()
    meter.take({"a": counts(1)})
    assert meter.interval(1.0).load is None


def test_acceptance_and_prefix_hits_are_those_of_the_interval():
    meter = LoadMeter()
    meter.take({"a": counts(10, verified_steps=100, accepted_tokens=0, queried_tokens=1000, cached_tokens=0)})
    meter.interval(1.0)
    meter.take({"a": counts(20, verified_steps=200, accepted_tokens=150, queried_tokens=2000, cached_tokens=250)})
    found = meter.interval(1.0)
    assert (found.tokens_per_step, found.num_steps, found.load.prefix_hit_rate) == (2.5, 100, 0.25)


def test_counts_survive_the_way_through_ray():
    one = counts(3, underway=2, verified_steps=7)
    assert ReplicaCounts.from_stats(one.to_stats()) == one
    assert ReplicaCounts.from_stats({}) == ReplicaCounts()


def test_counts_are_read_from_the_engines_metrics():
    metrics = [
        Gauge("vllm:num_requests_running", 2),
        Gauge("vllm:num_requests_waiting", 1),
        Counter("vllm:generation_tokens", 95),
        Counter("vllm:prefix_cache_queries", 80),
    ]
    found = counts_of(metrics, EndedCompletions(number=9, prompt_tokens=70, answer_tokens=90))
    assert (found.underway, found.finished, found.answer_tokens, found.prompt_tokens) == (3, 9, 90, 70)
    assert found.queried_tokens == 80
