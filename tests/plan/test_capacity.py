"""One engine's latencies and capacity, in worlds of which the answer is known, and against its simulation."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.step import StepPlan
from forerun.engine.costs import PRIOR
from forerun.engine.simulation import SimulationSettings, linear_decode_seconds
from forerun.engine.speculation import FixedLength
from forerun.errors import ConfigError
from forerun.executor.simulated_text import ConditionalAcceptance
from forerun.plan.capacity import max_rate, predict
from forerun.plan.draft_lengths import Speculation, fixed_lengths, step_table
from forerun.plan.load import Load
from forerun.plan.serving_policies import EngineModel, ServingPolicy, serving_policies
from forerun.plan.simulation.requests import synthetic_requests
from forerun.plan.simulation.simulate import simulate
from forerun.plan.sla import Sla
from forerun.plan.step_times import StepTimeModel
from tests.plan.worlds import LinearStepTimes, engine_model, speculation

LOAD = Load(rate=4, isl=200, osl=100)
RATES = (0.8, 0.7, 0.6)


def policy_of(engine: EngineModel, load: Load, drafter: Speculation | None, length: int) -> ServingPolicy:
    most = min(engine.max_num_seqs, engine.num_places(load, length))
    table = step_table(engine.step_times, drafter, max_batch_size=most, context=load.isl + load.osl / 2)
    return ServingPolicy(speculation=drafter, lengths=fixed_lengths(most, length), max_num_seqs=most, table=table)


def best_rate(engine: EngineModel, drafter: Speculation | None, load: Load, sla: Sla) -> float:
    policies = serving_policies(engine, [None] if drafter is None else [None, drafter], load)
    return max(max_rate(engine, policy, load, sla) for policy in policies)


def test_an_idle_engine_takes_a_step_per_token_and_one_for_the_prompt() -> None:
    engine = engine_model(LinearStepTimes(base=0.01, per_row=0.001, per_prompt_row=0.0001))
    at = predict(engine, policy_of(engine, LOAD, None, 0), LOAD, np.array([1e-9]))
    assert at.ttft.mean[0] == pytest.approx(0.01 + 200 * 0.0001, rel=1e-3)
    assert at.tpot.mean[0] == pytest.approx(0.011, rel=1e-3)
    assert at.icl.mean[0] == pytest.approx(0.011, rel=1e-3)
    assert at.e2el.mean[0] == pytest.approx(0.03 + 99 * 0.011, rel=1e-3)
    assert at.batch_size[0] == pytest.approx(0.0, abs=1e-6)


def test_the_batch_size_is_littles_fixed_point() -> None:
    """Where a step takes as long for all batch sizes: B = rate x (steps x seconds), stretched by prompts."""
    engine = engine_model(LinearStepTimes(base=0.01, per_row=0.0, per_prompt_row=0.0), max_num_seqs=512)
    load = replace(LOAD, rate=20.0)
    at = predict(engine, policy_of(engine, load, None, 0), load, np.array([20.0]))
    assert at.batch_size[0] == pytest.approx(20.0 * 100 * 0.01, rel=1e-6)


def test_a_request_runs_in_fewer_steps_of_more_tokens() -> None:
    engine = engine_model(LinearStepTimes(base=0.01, per_row=0.0, per_prompt_row=0.0))
    at = predict(engine, policy_of(engine, LOAD, speculation(*RATES), 3), LOAD, np.array([1e-9]))
    expected = 1 + 0.8 + 0.56 + 0.336
    assert at.acceptance_length[0] == pytest.approx(expected)
    assert at.tpot.mean[0] == pytest.approx(0.01 / expected, rel=0.02)  # the last step may write past the end
    assert at.icl.mean[0] == pytest.approx(0.01, rel=1e-3)


def test_the_number_of_steps_is_that_of_drawn_drafts() -> None:
    engine = engine_model()
    policy = policy_of(engine, LOAD, speculation(*RATES), 3)
    random, counts = np.random.default_rng(0), []
    for _ in range(4000):
        written, steps = 0, 0
        while written < 40:
            accepted = 0
            while accepted < 3 and random.random() < RATES[accepted]:
                accepted += 1
            written, steps = written + accepted + 1, steps + 1
        counts.append(steps)
    assert policy.steps_for(40)[0] == pytest.approx(np.mean(counts), rel=0.01)


def steps_of(step_times: LinearStepTimes) -> object:
    def seconds(plan: StepPlan) -> float:
        return step_times.base + step_times.per_row * len(plan.rows.token_ids)

    return seconds


@pytest.mark.parametrize(
    ("load", "length"),
    [
        (Load(rate=2, isl=100, osl=100), 0),
        (Load(rate=10, isl=100, osl=100), 3),
        (Load(rate=20, isl=100, osl=60), 3),
        (Load(rate=8, isl=100, osl=100, isl_cv=1.0, osl_cv=0.5), 0),
    ],
)
def test_the_formulas_agree_with_the_simulated_engine(load: Load, length: int) -> None:
    times = LinearStepTimes()
    engine = engine_model(times)
    drafter = speculation(*RATES) if length else None
    at = predict(engine, policy_of(engine, load, drafter, length), load, np.array([load.rate]))
    result = simulate(
        SimulationSettings(
            step_seconds=steps_of(times),
            drafting=ConditionalAcceptance(RATES) if length else None,
            max_num_seqs=engine.max_num_seqs,
            max_model_len=engine.max_model_len,
        ),
        synthetic_requests(load, 250, seed=1),
        make_control=lambda: FixedLength(num_speculative_tokens=length),
    )
    for name, tolerance in (("ttft", 0.15), ("tpot", 0.1), ("icl", 0.1), ("e2el", 0.1)):
        assert getattr(at, name).mean[0] == pytest.approx(result.latencies(name).mean, rel=tolerance), name


@pytest.mark.parametrize(
    ("load", "length", "name"),
    [
        (Load(rate=1, isl=300, osl=20, isl_cv=2.0), 0, "ttft"),
        (Load(rate=1, isl=800, osl=20, isl_cv=1.0, prefix_hit_rate=0.5), 0, "ttft"),
        (Load(rate=1, isl=100, osl=50, osl_cv=1.0), 3, "tpot"),
    ],
)
def test_the_slowest_requests_are_those_of_long_prompts_and_of_short_answers(
    load: Load, length: int, name: str
) -> None:
    """What the simulator draws: long prompts, most of which is behind what is cached, and answers too short to average luck out."""
    engine = engine_model(max_model_len=16_384)
    at = predict(engine, policy_of(engine, load, speculation(*RATES), length), load, np.array([load.rate]))
    result = simulate(
        SimulationSettings(
            decode_seconds=linear_decode_seconds,
            drafting=ConditionalAcceptance(RATES),
            max_model_len=engine.max_model_len,
        ),
        synthetic_requests(load, 500, seed=2),
        make_control=lambda: FixedLength(num_speculative_tokens=length),
    )
    assert getattr(at, name).quantile(0.95)[0] == pytest.approx(result.latencies(name).percentile(95), rel=0.18)


def test_prompts_that_read_themselves_take_longer_on_average_the_more_they_differ() -> None:
    """A prompt of L tokens reads L (L + 1) / 2: of lengths of mean m the mean of L² is m² (1 + cv²)."""
    seconds_per_pair = 1e-6
    weights = [1e-9] + [0.0] * (len(PRIOR) + 1)
    engine = engine_model(StepTimeModel([*weights[:-1], seconds_per_pair]), max_num_batched_tokens=100_000)
    for cv in (0.0, 0.5, 1.0):
        load = replace(LOAD, isl=300, isl_cv=cv)
        pairs = (300**2 * (1 + cv**2) + 300) / 2
        assert engine.seconds_of_prompts(load).mean() == pytest.approx(pairs * seconds_per_pair, rel=0.02)
        (share,) = predict(engine, policy_of(engine, load, None, 0), load, np.array([1.0])).prompt_share
        assert share == pytest.approx(pairs * seconds_per_pair, rel=0.02)


slas = st.builds(
    Sla,
    ttft=st.floats(0.05, 2.0),
    tpot=st.none() | st.floats(0.003, 0.05),
    e2el=st.none() | st.floats(1.0, 10.0),
    attainment=st.floats(0.5, 0.99),
)


@settings(max_examples=15)
@given(slas, st.floats(0.5, 1.0))
def test_a_stricter_sla_never_allows_a_higher_rate(sla: Sla, factor: float) -> None:
    limits = {name: getattr(sla, name) for name in ("ttft", "tpot", "e2el")}
    stricter = replace(sla, **{name: limit and limit * factor for name, limit in limits.items()})
    engine = engine_model(max_num_seqs=32)
    policy = policy_of(engine, LOAD, speculation(*RATES), 2)
    assert max_rate(engine, policy, LOAD, stricter) <= max_rate(engine, policy, LOAD, sla) * (1 + 1e-3) + 1e-6


@settings(max_examples=10)
@given(slas, st.lists(st.floats(0.0, 0.95), min_size=1, max_size=3).map(tuple), st.floats(0.0, 1.0))
def test_larger_acceptance_never_lowers_capacity(sla: Sla, rates: tuple[float, ...], gain: float) -> None:
    engine = engine_model(max_num_seqs=16)
    better = tuple(rate + (1.0 - rate) * gain for rate in rates)
    # capacities are found to a thousandth; a percent is left for the quantiles, which are approximate
    before, after = (best_rate(engine, speculation(*some), LOAD, sla) for some in (rates, better))
    assert after >= before * 0.99


@settings(max_examples=10)
@given(slas)
def test_drafts_that_are_never_right_are_no_speculation(sla: Sla) -> None:
    engine = engine_model(max_num_seqs=16)
    useless = best_rate(engine, speculation(0.0, 0.0), LOAD, sla)
    assert useless == pytest.approx(best_rate(engine, None, LOAD, sla))


def test_an_adaptive_drafter_is_planned_with_the_best_length_at_each_batch_size() -> None:
    adaptive = replace(speculation(*RATES), is_adaptive=True)
    policies = serving_policies(engine_model(max_num_seqs=16), [adaptive], LOAD)
    assert [one.max_num_seqs for one in policies] == [1, 2, 4, 8, 16]
    assert all(one.lengths is policies[0].lengths for one in policies)


def test_length_zero_is_no_speculation() -> None:
    engine = engine_model()
    rates = np.array([1.0, 5.0])
    drafting = predict(engine, policy_of(engine, LOAD, speculation(*RATES), 0), LOAD, rates)
    plain = predict(engine, policy_of(engine, LOAD, None, 0), LOAD, rates)
    assert drafting.e2el.mean == pytest.approx(plain.e2el.mean)
    assert drafting.tpot.quantile(0.9) == pytest.approx(plain.tpot.quantile(0.9))


def test_attainment_falls_with_the_rate_to_nothing() -> None:
    engine = engine_model()
    rates = np.linspace(0.5, 100.0, 60)
    at = predict(engine, policy_of(engine, LOAD, None, 0), LOAD, rates)
    attained = at.attainment(Sla(ttft=0.2, tpot=0.02))
    assert np.all(np.diff(attained) <= 1e-9)
    assert attained[0] > 0.95
    assert attained[-1] == 0.0
    assert not at.is_stable[-1]
    assert at.ttft.mean[-1] == math.inf


def test_burstier_arrivals_wait_longer() -> None:
    engine = engine_model(max_num_seqs=8)
    waits = []
    for cv in (0.0, 1.0, 3.0):
        load = replace(LOAD, rate=8.0, cv=cv)
        waits.append(predict(engine, policy_of(engine, load, None, 0), load, np.array([8.0])).ttft.mean[0])
    assert waits == sorted(waits)
    assert waits[2] > waits[1] * 1.1


def test_clumps_of_arrivals_see_no_steps_that_no_batch_has() -> None:
    """Where drafts end at a batch size, steps of more sequences are shorter; that does not go on beyond all places."""
    engine = engine_model(max_num_seqs=16)
    policy = policy_of(engine, LOAD, speculation(*RATES, per_token=0.002), 3)
    policy = replace(policy, lengths=np.array([3] * 4 + [0] * 12))
    for cv in (0.0, 3.0, 50.0):
        at = predict(engine, policy, replace(LOAD, cv=cv), np.array([0.5, 1.0, 2.0]))
        assert at.is_stable.all()
        assert (at.icl.mean >= policy.step_seconds.min()).all()
        assert np.isfinite(at.ttft.mean).all()


def test_the_prefix_cache_spares_prompt_time() -> None:
    engine = engine_model()
    cached = replace(LOAD, prefix_hit_rate=0.9)
    all_of_it, rest = (
        predict(engine, policy_of(engine, load, None, 0), load, np.array([4.0])).ttft.mean[0] for load in (LOAD, cached)
    )
    assert rest < all_of_it - 0.015  # 180 rows of 0.1 ms


def test_places_are_those_whose_kv_fits() -> None:
    engine = engine_model(num_blocks=100, block_size=16)
    load = Load(rate=1, isl=150, osl=20)
    places = engine.num_places(load, 0)
    assert 6 <= places <= 9  # of at most 11 blocks each
    assert engine.num_places(load, 8) <= places
    assert engine.num_places(replace(load, osl=4000.0), 0) == 0


def test_a_load_that_does_not_fit_the_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len 8192; must be at most that"):
        serving_policies(engine_model(), [None], Load(rate=1, isl=8000, osl=500))
    with pytest.raises(ConfigError, match="one sequence of 1000 tokens needs more than the profile's 10 blocks"):
        serving_policies(engine_model(num_blocks=10), [None], Load(rate=1, isl=500, osl=500))


def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    engine = engine_model()
    load = replace(LOAD, osl=1.0)
    at = predict(engine, policy_of(engine, load, None, 0), load, np.array([4.0]))
    assert at.tpot.mean[0] == 0.0
    assert at.attainment(Sla(tpot=1e-6))[0] == 1.0
    assert at.e2el.mean[0] == pytest.approx(at.ttft.mean[0])


@pytest.mark.parametrize("num_engines", [1.0, 4.0])
@pytest.mark.parametrize(
    ("load", "limits"),
    [
        (LOAD, {}),
        (replace(LOAD, isl=1500, isl_cv=1.0, cv=2.0), {}),
        (replace(LOAD, isl=1000), {"max_num_batched_tokens": 128}),
        (replace(LOAD, osl=1), {}),
    ],
)
def test_utilization_rises_with_the_load_and_is_1_where_the_engine_cannot_keep_up(
    load: Load, limits: dict[str, int], num_engines: float
) -> None:
    engine = engine_model(**limits)
    at = predict(
        engine, policy_of(engine, load, None, 0), load, np.geomspace(0.01, 500.0, 200), num_engines=num_engines
    )
    assert (np.diff(at.utilization) > 0.0).all()
    assert ((at.utilization < 1.0) == at.is_stable).all()


def test_utilization_is_the_load_over_the_most_that_can_be_served() -> None:
    engine = engine_model()
    rates = np.geomspace(0.01, 500.0, 200)
    at = predict(engine, policy_of(engine, LOAD, None, 0), LOAD, rates)
    most = rates[at.is_stable].max()
    assert (at.utilization / rates)[rates < 100.0] == pytest.approx(1.0 / most, rel=0.06)
