"""Counts of engines, in worlds of which the optimum is known."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import ConfigError
from forerun.plan.capacity import predict
from forerun.plan.deployment_plan import Layout
from forerun.plan.fleet_plan import FleetAnswer, FleetSearch, kept_engines, least_count, plan_fleet
from forerun.plan.fleet_prediction import FleetPrediction
from forerun.plan.load import Load
from forerun.plan.serving_policies import ServingPolicy, serving_policies
from forerun.plan.simulation.fleet import Transfer
from forerun.plan.sla import Sla
from tests.plan.worlds import LinearStepTimes, engine_model, speculation

LOAD = Load(rate=60, isl=100, osl=50)
SLA = Sla(ttft=0.3, tpot=0.02)
ENGINE = engine_model(max_num_seqs=16)
DRAFTER = speculation(0.8, 0.7)

loads = st.builds(
    Load, rate=st.floats(0.1, 300.0), isl=st.floats(1, 500), osl=st.floats(1, 200), cv=st.floats(0.0, 2.0)
)
slas = st.builds(
    Sla, ttft=st.floats(0.02, 1.0), tpot=st.none() | st.floats(0.003, 0.05), attainment=st.floats(0.5, 0.99)
)


@given(st.integers(1, 500), st.integers(1, 500))
def test_the_least_count_is_found(least: int, most: int) -> None:
    found = least_count(lambda counts: counts >= least, most)
    assert found == (least if least <= most else None)


@settings(max_examples=10)
@given(loads, slas)
def test_the_plan_is_the_fewest_engines_of_an_exhaustive_search(load: Load, sla: Sla) -> None:
    answer = plan_fleet(ENGINE, [DRAFTER], load, sla, most_engines=40)
    counts = np.arange(1, 41)
    policies = serving_policies(ENGINE, [None, DRAFTER], load)
    tried = [predict(ENGINE, one, load, load.rate / counts, num_engines=counts) for one in policies]
    attained = [one.attainment(sla) >= sla.attainment for one in tried]
    enough = np.any(attained, axis=0)
    assert answer.is_feasible == bool(enough.any())
    if answer.is_feasible:
        assert answer.plan.num_engines == counts[np.argmax(enough)]
        assert answer.plan.attainment >= sla.attainment


@settings(max_examples=10)
@given(loads, slas)
def test_the_plan_apart_is_the_fewest_engines_of_an_exhaustive_search(load: Load, sla: Sla) -> None:
    """All divisions of up to 24 engines, so that giving up after eight prefill engines in vain is held to it too."""
    most, layouts = 24, (Layout.DISAGGREGATED,)
    answer = plan_fleet(ENGINE, [DRAFTER], load, sla, most_engines=most, layouts=layouts)
    prefill, decode = np.array([(one, both - one) for both in range(2, most + 1) for one in range(1, both)]).T
    fleet = FleetPrediction(engine=ENGINE, load=load, transfer=Transfer())
    policies = serving_policies(ENGINE, [None, DRAFTER], load)
    attained = [fleet.apart(one, prefill, decode).attainment(sla) >= sla.attainment for one in policies]
    enough = np.any(attained, axis=0)
    assert answer.is_feasible == bool(enough.any())
    if answer.is_feasible:
        assert answer.plan.num_engines == (prefill + decode)[enough].min()
        assert answer.plan.attainment >= sla.attainment


@settings(max_examples=10)
@given(loads, slas, st.floats(0.3, 1.0), st.sampled_from(list(Layout)))
def test_a_stricter_sla_never_needs_fewer_engines(load: Load, sla: Sla, factor: float, layout: Layout) -> None:
    stricter = replace(sla, ttft=sla.ttft and sla.ttft * factor, tpot=sla.tpot and sla.tpot * factor)
    before, after = (plan_fleet(ENGINE, [DRAFTER], load, some, layouts=(layout,)) for some in (sla, stricter))
    assert not (after.is_feasible and not before.is_feasible)
    if after.is_feasible:
        assert after.plan.num_engines >= before.plan.num_engines


@settings(max_examples=10)
@given(loads, slas, st.integers(1, 5), st.sampled_from([(Layout.AGGREGATED,), tuple(Layout)]))
def test_the_budget_is_kept(load: Load, sla: Sla, budget: int, layouts: tuple[Layout, ...]) -> None:
    answer = plan_fleet(ENGINE, [DRAFTER], load, sla, most_engines=budget, layouts=layouts)
    assert 1 <= answer.plan.num_engines <= budget
    if not answer.is_feasible:
        assert answer.plan.attainment < sla.attainment
        assert answer.needed is None or answer.needed > budget


@settings(max_examples=10)
@given(loads, slas, st.none() | st.integers(2, 20), st.sampled_from([(Layout.AGGREGATED,), tuple(Layout)]))
def test_counts_that_are_predicted_once_give_the_plan_of_those_that_are_predicted_whenever_they_are_asked_for(
    load: Load, sla: Sla, budget: int | None, layouts: tuple[Layout, ...]
) -> None:
    def plan() -> FleetAnswer:
        return plan_fleet(ENGINE, [DRAFTER], load, sla, most_engines=budget, layouts=layouts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FleetPrediction, "_predict", FleetPrediction._predict_anew)
        anew = plan()
    once = plan()
    assert (once.is_feasible, once.needed) == (anew.is_feasible, anew.needed)
    assert (once.plan.prefill_replicas, once.plan.replicas) == (anew.plan.prefill_replicas, anew.plan.replicas)
    assert once.plan.policy.schedule == anew.plan.policy.schedule
    assert once.plan.policy.max_num_seqs == anew.plan.policy.max_num_seqs
    assert once.plan.attainment == pytest.approx(anew.plan.attainment, rel=1e-9)
    assert once.plan.e2el.mean == pytest.approx(anew.plan.e2el.mean, rel=1e-9)


@settings(max_examples=10)
@given(loads, slas, st.floats(0.0, 0.9), st.floats(0.0, 0.9), st.sampled_from(list(Layout)))
def test_more_of_the_prompts_in_the_caches_never_needs_more_engines(
    load: Load, sla: Sla, first: float, second: float, layout: Layout
) -> None:
    less, more = (
        plan_fleet(ENGINE, [DRAFTER], replace(load, prefix_hit_rate=rate), sla, layouts=(layout,))
        for rate in sorted((first, second))
    )
    assert not (less.is_feasible and not more.is_feasible)
    if less.is_feasible:
        assert more.plan.num_engines <= less.plan.num_engines


def test_the_spread_of_answers_alone_makes_no_sla_of_time_per_token_impossible_apart() -> None:
    load, sla = Load(rate=10, isl=1000, osl=200), Sla(tpot=0.006)
    alike, spread = (
        plan_fleet(engine_model(), [], replace(load, osl_cv=cv), sla, layouts=(Layout.DISAGGREGATED,))
        for cv in (0.0, 1.0)
    )
    assert alike.is_feasible
    assert spread.is_feasible
    assert spread.plan.num_engines <= alike.plan.num_engines + 1


def test_no_number_of_prefill_engines_makes_long_prompts_short() -> None:
    load, sla = Load(rate=2, isl=1000, osl=50, isl_cv=1.0), Sla(ttft=0.15)
    answer = plan_fleet(engine_model(), [], load, sla, layouts=(Layout.DISAGGREGATED,))
    assert impossible(answer)  # a quarter of the prompts takes an idle engine longer


def test_without_drafts_that_help_the_plan_is_that_without_speculation() -> None:
    plain = plan_fleet(ENGINE, [], LOAD, SLA)
    useless = plan_fleet(ENGINE, [speculation(0.0, 0.0)], LOAD, SLA)
    assert useless.plan.policy.speculation is None
    assert useless.plan.num_engines == plain.plan.num_engines
    assert useless.plan.e2el.mean == pytest.approx(plain.plan.e2el.mean)


def test_drafts_that_help_save_engines() -> None:
    times = LinearStepTimes(per_row=0.00001)
    engine = engine_model(times, max_num_seqs=16)
    plain, drafted = (plan_fleet(engine, some, LOAD, Sla(tpot=0.004)).plan for some in ([], [DRAFTER]))
    assert drafted.num_engines < plain.num_engines
    assert drafted.policy.max_draft_tokens == 2


def test_the_cheaper_of_two_equal_drafters_is_taken() -> None:
    dear = speculation(0.8, 0.7, name="dear", per_token=0.0005)
    cheap = speculation(0.8, 0.7, name="cheap")
    answer = plan_fleet(ENGINE, [dear, cheap], LOAD, SLA)
    assert answer.plan.policy.speculation is cheap


def impossible(answer: FleetAnswer) -> bool:
    return not answer.is_feasible and answer.needed is None


def test_an_sla_that_no_engine_meets_is_said_and_not_relaxed() -> None:
    assert impossible(plan_fleet(ENGINE, [DRAFTER], LOAD, Sla(ttft=0.001), most_engines=8))
    assert impossible(plan_fleet(ENGINE, [DRAFTER], LOAD, Sla(tpot=0.0005), most_engines=8))


@settings(max_examples=10)
@given(
    loads,
    st.floats(1.0, 4.0),
    st.sampled_from(["ttft", "tpot"]),
    st.sampled_from([(Layout.AGGREGATED,), (Layout.DISAGGREGATED,), tuple(Layout)]),
)
def test_engines_beyond_those_of_an_impossible_plan_bring_nothing(
    load: Load, factor: float, name: str, layouts: tuple[Layout, ...]
) -> None:
    """No step is as short as half a millisecond: the plan has as many engines as come near to what idle ones take, not 4096."""
    sla = Sla(**{name: 0.0005})
    load = replace(load, osl=max(4.0, load.osl))
    plan = plan_fleet(ENGINE, [DRAFTER], load, sla, layouts=layouts).plan
    search = FleetSearch(ENGINE, load, sla, Transfer())
    more = search.at(plan.policy, round(factor * plan.prefill_replicas), round(factor * plan.replicas))
    assert plan.is_stable
    assert getattr(more, name).quantile(0.95)[0] >= getattr(plan, name).quantile(0.95)[0] / 1.06
    assert more.attainment <= plan.attainment + 0.01
    assert plan.num_engines < 40 + 10 * load.rate


def test_a_budget_that_is_too_small_says_how_many_would_do() -> None:
    enough = plan_fleet(ENGINE, [DRAFTER], LOAD, SLA)
    short = plan_fleet(ENGINE, [DRAFTER], LOAD, SLA, most_engines=enough.plan.num_engines - 1)
    assert not short.is_feasible
    assert short.needed == enough.plan.num_engines
    assert short.plan.num_engines == enough.plan.num_engines - 1


def test_a_load_above_what_any_plan_reaches_is_infeasible() -> None:
    answer = plan_fleet(ENGINE, [DRAFTER], replace(LOAD, rate=1e7), SLA)
    assert impossible(answer)
    assert answer.plan.attainment == 0.0


@pytest.mark.parametrize("times", [1.05, 1.5, 10.0, 1000.0])
def test_engines_that_are_too_few_run_as_those_that_keep_up_with_most(times: float) -> None:
    policies = serving_policies(ENGINE, [None, DRAFTER], LOAD)

    def most(policy: ServingPolicy) -> float:
        rates = np.linspace(1.0, 400.0, 2000)
        return float(rates[predict(ENGINE, policy, LOAD, rates, num_engines=1).is_stable].max())

    capacity = max(map(most, policies))
    answer = plan_fleet(ENGINE, [DRAFTER], replace(LOAD, rate=times * capacity), SLA, most_engines=1)
    assert not answer.plan.is_stable
    assert answer.plan.policy.speculation is not None, "where drafts raise what an engine can do"
    assert most(answer.plan.policy) >= 0.97 * capacity


def test_prompts_apart_spare_decoding_their_stalls() -> None:
    load, strict = Load(rate=10, isl=2000, osl=200), Sla(ttft=0.6, tpot=0.008, attainment=0.9)
    together, apart = (plan_fleet(ENGINE, [], load, strict, layouts=(layout,)).plan for layout in Layout)
    assert apart.prefill_replicas >= 3  # 10 per second of 0.2 s each, and room
    assert apart.num_engines < together.num_engines
    assert plan_fleet(ENGINE, [], load, strict, layouts=tuple(Layout)).plan.num_engines == apart.num_engines


def test_handing_over_kv_takes_its_time() -> None:
    def mean(transfer: Transfer) -> float:
        plan = plan_fleet(ENGINE, [], LOAD, Sla(ttft=1.0), layouts=(Layout.DISAGGREGATED,), transfer=transfer).plan
        return float(plan.e2el.mean[0])

    slow = Transfer(seconds=0.1, bytes_per_token=1000.0, bytes_per_second=1e6)
    assert mean(slow) - mean(Transfer()) == pytest.approx(0.1 + 0.1, rel=1e-6)


@pytest.mark.parametrize(
    ("layouts", "budget", "said"),
    [((), 4, "got none"), ((Layout.DISAGGREGATED,), 1, "at least 2"), ((Layout.AGGREGATED,), 0, "at least 1")],
)
def test_a_budget_without_an_engine_is_refused(layouts: tuple[Layout, ...], budget: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_fleet(ENGINE, [], LOAD, SLA, layouts=layouts, most_engines=budget)


def test_engines_are_given_up_only_where_the_others_stay_below_the_limit() -> None:
    def busy(count: int) -> float:
        return 1.5 / count

    assert kept_engines(1, running=3, busy_share=busy) == 2  # one would be overloaded, two are at 75 %
    assert kept_engines(1, running=2, busy_share=lambda count: 0.9 / count) == 2  # one would be at 90 %
    assert kept_engines(1, running=2, busy_share=lambda count: 0.7 / count) == 1
    assert kept_engines(4, running=2, busy_share=busy) == 4


@given(st.floats(0.01, 20.0), st.integers(1, 30))
def test_the_count_of_engines_comes_to_rest(load: float, running: int) -> None:
    """The same load twice gives the same count: no going back and forth."""

    def busy(count: int) -> float:
        return load / count

    needed = next(count for count in range(1, 100) if busy(count) < 1.0)
    once = kept_engines(needed, running=running, busy_share=busy)
    assert kept_engines(needed, running=once, busy_share=busy) == once
