"""Days of traffic: what was planned, what it cost, who attained the SLA."""

import math
from dataclasses import replace

import pytest

from forerun.errors import ConfigError
from forerun.plan.day_plan import DayPlan
from forerun.plan.day_replay import (
    MEAN,
    ORACLE,
    PEAK,
    DayReplay,
    Interval,
    LoadForecast,
    intervals_of,
    replay_day,
    replay_notes,
)
from forerun.plan.fleet_plan import plan_fleet
from forerun.plan.load import Load
from forerun.plan.predictors import ConstantPredictor, HarmonicPredictor, make_predictor
from forerun.plan.simulation.fleet import Transfer
from forerun.plan.simulation.requests import SimulatedRequest
from forerun.plan.sla import Sla
from tests.plan.worlds import engine_model, speculation

SLA = Sla(ttft=0.3, tpot=0.02, attainment=0.9)
ENGINE = engine_model(max_num_seqs=16)
POLICY = plan_fleet(ENGINE, [speculation(0.8, 0.7)], Load(rate=60, isl=100, osl=50), SLA).plan.policy
REPLAY = DayReplay(ENGINE, POLICY, SLA, transfer=Transfer())
HOUR = 3600.0


def interval(number: int, rate: float) -> Interval:
    load = Load(rate=rate, isl=100, osl=50) if rate else None
    return Interval(start=number * HOUR, num_requests=round(rate * HOUR), load=load)


def wave(num_days: int) -> list[Interval]:
    return [interval(hour, 40 + 35 * math.sin(2 * math.pi * hour / 24)) for hour in range(24 * num_days)]


def by_name(plans: list[DayPlan]) -> dict[str, DayPlan]:
    return {plan.name: plan for plan in plans}


def test_whoever_knows_what_comes_attains_the_sla_in_every_interval() -> None:
    plans = by_name(replay_day(REPLAY, wave(1), ["constant"]))
    assert plans[ORACLE].worst >= SLA.attainment
    assert plans[PEAK].worst >= SLA.attainment
    assert plans[ORACLE].engine_hours < plans[PEAK].engine_hours
    assert plans[MEAN].worst < SLA.attainment
    assert plans[PEAK].num_changes == 0


def test_a_pattern_is_planned_better_than_the_last_value() -> None:
    plans = by_name(replay_day(REPLAY, wave(4), ["constant", "harmonic"]))
    assert plans["harmonic"].rate_error < plans["constant"].rate_error / 2


def test_what_cannot_be_served_waits_for_the_next_interval() -> None:
    intervals = [interval(0, 10), interval(1, 200), interval(2, 10)]
    capacity = REPLAY.engines_for(Load(rate=10, isl=100, osl=50))
    plan = REPLAY.with_counts("fixed", intervals, [capacity] * 3, [one.load for one in intervals])
    quiet, burst, after = plan.intervals
    assert (quiet.backlog, quiet.attained > 0.9 * quiet.num_requests) == (0.0, True)
    assert burst.attained == 0.0
    assert burst.backlog > 0.0
    assert after.backlog > 0.0  # of 10 per second that it takes besides, 190 are left
    assert after.attained == 0.0
    assert plan.worst == 0.0


def test_a_backlog_waits_through_an_interval_in_which_nobody_comes() -> None:
    """It is worked off there as fast as engines serve when they are full, and not at once."""
    intervals = [interval(0, 1000), *(interval(hour, 0) for hour in range(1, 100))]
    count = REPLAY.engines_for(Load(rate=10, isl=100, osl=50))
    plan = REPLAY.with_counts("fixed", intervals, [count] * len(intervals), [one.load for one in intervals])
    burst, quiet, after, *_, last = plan.intervals
    served = burst.num_requests - burst.backlog
    assert quiet.backlog == pytest.approx(burst.backlog - served)
    assert after.backlog == pytest.approx(burst.backlog - 2 * served)
    assert after.backlog > 0.0
    assert last.backlog == 0.0


def test_a_backlog_that_is_worked_off_early_spoils_only_the_beginning() -> None:
    intervals = [interval(0, 60), interval(1, 1)]
    count = REPLAY.engines_for(Load(rate=30, isl=100, osl=50))
    _, after = REPLAY.with_counts("fixed", intervals, [count] * 2, [one.load for one in intervals]).intervals
    assert after.backlog == 0.0
    assert 0.0 < after.attained < after.num_requests


def test_an_empty_interval_keeps_one_engine_and_spoils_nothing() -> None:
    intervals = [interval(0, 5), interval(1, 0), interval(2, 0)]
    plan = REPLAY.run("oracle", intervals, [one.load for one in intervals], steadily=False)
    assert [one.engines for one in plan.intervals[1:]] == [1, 1]
    assert plan.attainment >= SLA.attainment


def test_engines_stay_where_fewer_would_be_too_busy() -> None:
    rates = [40, 39, 40, 39, 40]
    intervals = [interval(number, rate) for number, rate in enumerate(rates)]
    plan = REPLAY.run("oracle", intervals, [one.load for one in intervals])
    assert plan.num_changes == 0


def test_where_a_trend_has_run_away_to_nothing_the_last_load_is_forecast() -> None:
    trend, forecast = make_predictor("kalman"), LoadForecast(lambda: make_predictor("kalman"))
    for rate in [400.0] * 6 + [60.0] * 4:
        trend.add(rate)
        forecast.add(Load(rate=rate, isl=100, osl=50))
    assert trend.predict() == 0.0
    assert forecast.predict() == Load(rate=60, isl=100, osl=50)


def test_engines_that_the_last_load_keeps_busy_are_not_given_up_for_a_lower_forecast() -> None:
    intervals = [interval(number, rate) for number, rate in enumerate([400.0] * 6 + [150.0] * 8)]
    forecasts = [intervals[0].load, *(Load(rate=rate, isl=100, osl=50) for rate in [400.0] * 6 + [5.0] * 7)]
    plan = REPLAY.run("kalman", intervals, forecasts)
    enough = REPLAY.run("kalman", intervals, [one.load for one in intervals])
    assert [one.engines for one in plan.intervals[7:]] == [one.engines for one in enough.intervals[7:]]
    assert plan.intervals[-1].backlog == 0.0


def test_after_an_empty_interval_nothing_is_forecast_by_the_last_value() -> None:
    forecast = LoadForecast(ConstantPredictor)
    forecast.add(Load(rate=5, isl=100, osl=50))
    forecast.add(None)
    assert forecast.predict() is None


def test_the_budget_is_kept_all_day() -> None:
    replay = DayReplay(ENGINE, POLICY, SLA, most_engines=2, transfer=Transfer())
    plans = replay_day(replay, wave(1), ["ar"])
    assert all(one.engines <= 2 for plan in plans for one in plan.intervals)


def test_prompts_apart_have_their_share_of_engines() -> None:
    replay = DayReplay(ENGINE, POLICY, SLA, prefill_share=0.5, transfer=Transfer())
    plans = by_name(replay_day(replay, wave(1), ["constant"]))
    assert plans[ORACLE].worst >= SLA.attainment
    assert min(one.engines for one in plans[ORACLE].intervals) >= 2


def test_a_trace_is_counted_by_interval() -> None:
    requests = [
        SimulatedRequest(arrival=arrival, num_prompt_tokens=prompt, num_output_tokens=10)
        for arrival, prompt in ((0.0, 100), (1.0, 300), (2.0, 200), (21.0, 50))
    ]
    first, second, third = intervals_of(requests, 10.0)
    assert (first.num_requests, second.num_requests, third.num_requests) == (3, 0, 1)
    assert first.load is not None
    assert (first.load.rate, first.load.isl, first.load.osl) == (0.3, 200.0, 10.0)
    assert first.load.cv == 0.0
    assert first.load.isl_cv == pytest.approx(0.408, abs=1e-3)
    assert second.load is None
    assert third.load is not None
    assert third.load.cv == 1.0  # one request says nothing of gaps


def shared_prompts(count: int, *, shares_beginning: bool = True) -> list[SimulatedRequest]:
    """One a second, of 1000 tokens, of which 900 are those of all others, or of the conversation that a prompt is part of."""
    return [
        SimulatedRequest(
            arrival=float(number),
            num_prompt_tokens=1000,
            num_output_tokens=10,
            piece_hashes=(
                *(range(9) if shares_beginning else range(100 * (number // 4), 100 * (number // 4) + 9)),
                7 + number,
            ),
            piece_size=100,
        )
        for number in range(count)
    ]


def test_the_beginning_that_prompts_share_counts_as_cached() -> None:
    for interval_of in intervals_of(shared_prompts(40), 10.0):
        assert interval_of.load is not None
        assert interval_of.load.prefix_hit_rate == pytest.approx(0.9)
    (given, *_) = intervals_of(shared_prompts(40), 10.0, prefix_hit_rate=0.5)
    assert given.load is not None
    assert given.load.prefix_hit_rate == 0.5
    plain = [replace(one, piece_hashes=()) for one in shared_prompts(40)]
    (unknown, *_) = intervals_of(plain, 10.0)
    assert unknown.load is not None
    assert unknown.load.prefix_hit_rate == 0.0
    cached, computed = (REPLAY.engines_for(replace(one, rate=60.0)) for one in (given.load, unknown.load))
    assert cached < computed


def test_what_repeats_in_another_way_is_said_and_not_counted() -> None:
    requests = shared_prompts(40, shares_beginning=False)
    intervals = intervals_of(requests, 10.0)
    assert {one.load.prefix_hit_rate for one in intervals if one.load} == {0.0}
    (note,) = replay_notes(requests, intervals, ["constant"])
    assert note.startswith("68% of the trace's prompt tokens were in earlier prompts, and 0% are in the beginning")
    alike = shared_prompts(40)
    assert not replay_notes(alike, intervals_of(alike, 10.0), ["constant"])


def test_a_period_of_any_length_is_planned_by_its_pattern() -> None:
    """Traffic that repeats itself every 6.5 hours: with the period of a day it looks like noise, as it does to the last value."""
    intervals = [interval(hour, 40 + 35 * math.sin(2 * math.pi * hour / 6.5)) for hour in range(30)]
    plans = by_name(replay_day(REPLAY, intervals, ["constant", "harmonic"], period=6.5 * HOUR))
    assert plans["harmonic"].rate_error < 0.7 * plans["constant"].rate_error
    with pytest.raises(ConfigError, match="must be at least two of them for the predictor harmonic"):
        replay_day(REPLAY, intervals, ["harmonic"], period=1.5 * HOUR)


def test_a_trace_of_one_period_says_nothing_of_the_pattern() -> None:
    requests = shared_prompts(40)
    intervals = intervals_of(requests, 10.0)
    (note,) = replay_notes(requests, intervals, ["harmonic"], period=40.0)
    assert note.startswith("harmonic predicts the last value, as constant does")
    assert not replay_notes(requests, intervals, ["harmonic"], period=30.0)
    harmonic, constant = (replay_day(REPLAY, wave(1), [name])[0] for name in ("harmonic", "constant"))
    assert harmonic.intervals == constant.intervals


def test_an_interval_of_which_not_one_request_fits_is_refused() -> None:
    small = replace(ENGINE, num_blocks=8)
    replay = DayReplay(small, POLICY, SLA, transfer=Transfer())
    assert replay.engines_for(Load(rate=1, isl=60, osl=60)) >= 1
    assert replay.engines_for(Load(rate=1, isl=64, osl=64)) >= 1  # which its drafts would not fit beside
    with pytest.raises(ConfigError, match="one sequence of 160 tokens needs more than the profile's 8 blocks"):
        replay.engines_for(Load(rate=1, isl=100, osl=60))


def test_no_forecast_is_longer_than_a_request_can_be() -> None:
    forecast = LoadForecast(lambda: make_predictor("kalman"), longest=400)
    for isl in range(100, 400, 50):
        forecast.add(Load(rate=4, isl=isl, osl=50))
    predicted = forecast.predict()
    assert predicted is not None
    assert (predicted.isl, predicted.osl) == (350.0, 50.0)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.0, "above 0"),
        (100.0, "longer than one interval of 100 s"),
        (1e-6, "more than 50,000; must be at least 0.0001 s"),
    ],
)
def test_a_trace_too_short_for_its_interval_is_refused(seconds: float, said: str) -> None:
    requests = [SimulatedRequest(arrival=5.0, num_prompt_tokens=1, num_output_tokens=1)]
    with pytest.raises(ConfigError, match=said):
        intervals_of(requests, seconds)


def test_an_empty_interval_says_nothing_of_lengths() -> None:
    forecast = LoadForecast(ConstantPredictor)
    assert forecast.predict() is None
    forecast.add(Load(rate=4, isl=100, osl=50, cv=2.0))
    predicted = forecast.predict()
    assert predicted is not None
    assert (predicted.rate, predicted.isl, predicted.cv) == (4.0, 100.0, 2.0)
    forecast.add(None)
    assert forecast.predict() is None


def test_lengths_keep_the_period_of_the_day_where_nobody_comes_at_night() -> None:
    forecast = LoadForecast(lambda: HarmonicPredictor(8))
    errors = []
    for number in range(64):
        isl = 300.0 + 200.0 * math.sin(2 * math.pi * number / 8)
        predicted = forecast.predict()
        is_night = number % 8 in (5, 6, 7)
        if number >= 32 and predicted is not None and not is_night:
            errors.append(abs(predicted.isl - isl))
        forecast.add(None if is_night else Load(rate=4, isl=isl, osl=50))
    assert len(errors) == 4 * 5
    assert max(errors) < 30.0
