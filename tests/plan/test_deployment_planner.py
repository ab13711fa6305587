"""Plans of a profile: what is written down, what is said of it, and what the simulator says."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from forerun.config.speculative_config import resolve_speculative
from forerun.drafters.neural.sampling import DraftSamplingConfig
from forerun.errors import ConfigError
from forerun.plan.acceptance import AcceptanceProfile
from forerun.plan.capacity import Routing
from forerun.plan.confirmation import confirmed, planned_engine, simulated
from forerun.plan.deployment_plan import DeploymentPlan, Layout
from forerun.plan.deployment_planner import (
    PlanningOptions,
    corrected,
    engine_model,
    joules_per_token,
    plan_deployment,
    speculative_config,
    with_running,
)
from forerun.plan.drafting_choices import speculations
from forerun.plan.fleet_plan import FleetSearch
from forerun.plan.load import Load
from forerun.plan.profile import Profile
from forerun.plan.simulation.profiled import profiled_engine
from forerun.plan.simulation.requests import synthetic_requests
from forerun.plan.simulation.result import SimulationResult
from forerun.plan.sla import Sla
from forerun.plan.step_times import FREE_DRAFTING
from tests.plan.profiles import TREE, TREE_CONFIGS, fake_profile, tree_profile

LOAD, SLA = Load(rate=50, isl=200, osl=60), Sla(ttft=0.5, tpot=0.02)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return fake_profile(tmp_path_factory.mktemp("profile"))


def test_a_plan_is_json_and_comes_back(profile: Profile, tmp_path: Path) -> None:
    plan, answer = plan_deployment(profile, LOAD, SLA)
    assert plan.feasible
    assert plan.replicas == answer.plan.num_engines
    assert DeploymentPlan.load_file(plan.save(tmp_path)) == plan
    assert plan.predicted["ttft_p95_ms"] <= 500
    assert plan.predicted["max_requests_per_second"] >= LOAD.rate
    assert plan.predicted["goodput_requests_per_second"] == pytest.approx(50 * plan.predicted["attainment"])


def test_the_planned_configuration_is_one_that_the_engine_takes(profile: Profile) -> None:
    plan, answer = plan_deployment(profile, LOAD, SLA)
    assert plan.speculative_config is not None
    assert plan.speculative_config["num_speculative_tokens"] == answer.plan.policy.max_draft_tokens
    assert plan.acceptance is not None
    assert plan.acceptance["method"] == plan.speculative_config["method"]


def test_the_planned_engine_is_the_profiled_one(profile: Profile) -> None:
    changes = {
        "tensor_parallel_size": 2,
        "device": "cuda",
        "kernel_settings": {"device_matmul": "torch"},
        "block_size": 32,
    }
    plan, _ = plan_deployment(replace(profile, **changes), LOAD, SLA)
    assert {name: getattr(plan.engine, name) for name in changes} == changes


def test_a_gpu_is_planned_with_the_blocks_that_a_drafter_leaves(profile: Profile, tmp_path: Path) -> None:
    """Weights and KV of the drafter lie in the memory that was full of the profiled engine's KV; a CPU is given more."""
    matrix = {"fc.weight": np.zeros((1000, 1000), np.float32)}
    save_file(matrix, tmp_path / "model.safetensors")
    head = profile.configs["head"] | {"model": str(tmp_path)}
    with_kv = replace(
        profile,
        num_blocks=300,
        max_model_len=4800,
        configs=profile.configs | {"head": head},
        drafter_block_bytes={"head": 16 * profile.kv_bytes_per_token, "suffix": 0},
    )
    on_gpu = replace(with_kv, device="cuda")
    left = (300 - 2_000_000 / (16 * 46_080)) / 2
    only, load = replace(ALONE, methods=("head",)), Load(rate=5, isl=400, osl=60)
    (gpu,), (cpu,) = (speculations(one, methods=("head",)) for one in (on_gpu, with_kv))
    assert (gpu.num_blocks, cpu.num_blocks) == (math.floor(left), 300)
    assert profiled_engine(on_gpu, "head").settings.num_blocks == gpu.num_blocks
    assert profiled_engine(on_gpu, "suffix").settings.num_blocks == profiled_engine(on_gpu).settings.num_blocks == 300
    plan, answer = plan_deployment(on_gpu, load, EASY, only)
    assert answer.plan.policy.speculation is not None
    assert answer.plan.policy.max_num_seqs < 8
    assert plan.engine.max_model_len == 16 * gpu.num_blocks
    assert any("an engine has 148 of the profile's 300 KV blocks" in one for one in plan.warnings)
    assert simulated(on_gpu, answer.plan, load, num_requests=40).num_preemptions < 4
    assert plan_deployment(with_kv, load, EASY, only)[0].engine.max_model_len == 4800


def test_what_is_not_known_of_a_drafter_on_a_gpu_is_said(profile: Profile) -> None:
    on_gpu, load = replace(profile, device="cuda"), Load(rate=2, isl=100, osl=60)
    plan, _ = plan_deployment(on_gpu, load, EASY, replace(ALONE, methods=("head",)))
    weights, blocks = (one for one in plan.warnings if "a GPU's memory is planned without" in one)
    assert "'some/head'" in weights
    assert "each KV block" in blocks
    for known, methods in ((profile, ("head",)), (on_gpu, ("suffix",))):
        plan, _ = plan_deployment(known, load, EASY, replace(ALONE, methods=methods))
        assert not any("planned without" in one for one in plan.warnings)


def test_a_schedule_is_written_only_where_lengths_differ(profile: Profile) -> None:
    _, answer = plan_deployment(profile, LOAD, SLA, PlanningOptions(methods=("suffix",)))
    policy = answer.plan.policy
    lengths = policy.lengths.copy()
    lengths[:] = 2
    one = speculative_config(replace(answer.plan, policy=replace(policy, lengths=lengths)))
    assert one is not None
    assert "num_speculative_tokens_per_batch_size" not in one
    lengths = lengths.copy()
    lengths[4:] = 1
    two = speculative_config(replace(answer.plan, policy=replace(policy, lengths=lengths)))
    assert two is not None
    assert two["num_speculative_tokens"] == 2
    assert two["num_speculative_tokens_per_batch_size"] == [[1, 4, 2], [5, policy.max_num_seqs, 1]]
    resolved = resolve_speculative(two)
    assert (resolved.method, resolved.schedule) == ("suffix", ((1, 4, 2), (5, policy.max_num_seqs, 1)))


def test_a_configuration_that_chooses_its_lengths_keeps_them(profile: Profile) -> None:
    config = {"method": "suffix", "enable_adaptive_verification": True, "num_speculative_tokens": 4}
    adaptive = replace(profile, configs=profile.configs | {"suffix": config})
    plan, _ = plan_deployment(adaptive, LOAD, SLA, PlanningOptions(methods=("suffix",)))
    assert plan.speculative_config == config


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return tree_profile(tmp_path_factory.mktemp("trees"))


ALONE = PlanningOptions(most_engines=1)
EASY = Sla(ttft=2.0, tpot=0.05)


@pytest.mark.parametrize("name", TREE_CONFIGS)
def test_a_plan_of_trees_agrees_with_the_simulator(trees: Profile, name: str) -> None:
    """K counts nodes in both; were it the depth, a step would be thought to verify half of its rows."""
    load = Load(rate=5.0, isl=100, osl=60)
    plan, answer = plan_deployment(trees, load, EASY, replace(ALONE, methods=(name,)))
    assert answer.plan.policy.speculation is not None
    found = simulated(trees, answer.plan, load, num_requests=200)
    # auto learns the costs by which the plan chooses, and rows that hardly pay it may leave out
    assert found.speculation.acceptance_length == pytest.approx(plan.predicted["acceptance_length"], rel=0.15)
    for latency in ("ttft", "tpot", "e2el"):
        assert found.latencies(latency).mean == pytest.approx(plan.predicted[f"{latency}_mean_ms"] / 1e3, rel=0.1)


@pytest.mark.parametrize("name", ["static", "hybrid"])
@pytest.mark.parametrize("rate", [2.0, 8.0])
def test_a_plan_leaves_room_for_a_tree_and_for_the_drafters_of_a_hybrid(trees: Profile, name: str, rate: float) -> None:
    """The engine refuses a tree or a member that is larger than `num_speculative_tokens`; less is drafted by the schedule."""
    _, answer = plan_deployment(trees, Load(rate=rate, isl=100, osl=60), EASY, replace(ALONE, methods=(name,)))
    config = speculative_config(answer.plan)
    assert config is not None
    resolved = resolve_speculative(config)
    assert resolved.num_speculative_tokens == len(TREE)
    if isinstance(resolved.drafter, DraftSamplingConfig):
        resolved.drafter.sampling.check_size(resolved.num_speculative_tokens)
    control = resolved.control()
    planned = answer.plan.policy.lengths.tolist()
    unit = len(TREE) if name == "static" else 1  # of which the whole tree is computed, or nothing
    assert [control.draft_limit(size) for size in range(1, len(planned) + 1)] == [unit * one for one in planned]
    assert 0 in planned or rate < 5.0


def test_a_tree_that_is_a_chain_is_left_room_for_too(profile: Profile) -> None:
    """Of which the third token never stood, so that nothing is known beyond the second."""
    chain = {"method": "eagle3", "model": "some/head", "draft_tree": [1, 1, 1], "num_speculative_tokens": 3}
    acceptance = {"head": AcceptanceProfile(method="eagle3", conditional=(0.8, 0.7))}
    plain = replace(
        profile, configs={"head": chain}, acceptance=acceptance, traces={}, drafting={"head": FREE_DRAFTING}
    )
    plan, _ = plan_deployment(plain, Load(rate=2.0, isl=100, osl=60), EASY, ALONE)
    assert plan.speculative_config is not None
    assert resolve_speculative(plan.speculative_config).num_speculative_tokens == 3


def test_the_simulator_confirms_trees_of_all_their_nodes(trees: Profile) -> None:
    load = Load(rate=2.0, isl=100, osl=60)
    _, answer = plan_deployment(trees, load, EASY, replace(ALONE, methods=("auto",)))
    control = planned_engine(trees, answer.plan).make_control()
    assert control.num_speculative_tokens == len(TREE)
    assert profiled_engine(trees, "auto").make_control().num_speculative_tokens == len(TREE)


def test_without_a_trace_a_tree_is_planned_as_it_was_measured(trees: Profile) -> None:
    """So it is of a drafter that goes by the clock, of a verifier that draws anew, and where acceptance was corrected."""
    untraced = replace(trees, traces={})
    load = Load(rate=2.0, isl=100, osl=60)
    for name in ("recycle", "static", "hybrid"):
        plan, answer = plan_deployment(untraced, load, EASY, replace(ALONE, methods=(name,)))
        assert plan.speculative_config == TREE_CONFIGS[name]
        assert any("planned as they were measured" in one for one in plan.warnings)
        traced = {one.name: one for one in speculations(trees)}[name]
        speculation = answer.plan.policy.speculation
        assert speculation is not None
        (whole,) = speculation.yields
        assert (whole.num_nodes, whole.num_tokens) == (traced.yields[-1].num_nodes, traced.yields[-1].num_tokens)
        assert speculation.most_nodes == len(TREE)
    (auto,) = speculations(untraced, methods=("auto",))
    assert [one.num_nodes for one in auto.yields] == pytest.approx([7 / 3, 14 / 3, 7])


def test_a_correction_leaves_the_traces_of_other_configurations(trees: Profile) -> None:
    found = corrected(trees, time_factor=1.0, acceptance_factor=0.9, methods=("recycle",))
    assert set(found.traces) == {"static", "hybrid", "auto"}
    by_name = {one.name: one for one in speculations(found)}
    assert by_name["recycle"].is_whole
    assert len(by_name["hybrid"].yields) == len(TREE)
    (whole,) = by_name["recycle"].yields
    assert whole.num_tokens == pytest.approx(1.0 + 0.9 * (trees.acceptance["recycle"].mean_accept_length - 1.0))


def test_an_infeasible_plan_says_which_limit_no_engine_keeps(profile: Profile) -> None:
    plan, _ = plan_deployment(profile, LOAD, Sla(ttft=0.005), PlanningOptions(most_engines=2))
    assert not plan.feasible
    assert plan.best_achievable is not None
    assert plan.best_achievable["needed_replicas"] is None
    (missed,) = plan.best_achievable["limits_missed_when_idle"]
    assert missed.startswith("ttft: an idle engine takes")
    assert plan.replicas <= 2


@pytest.mark.parametrize("layouts", [(Layout.AGGREGATED,), tuple(Layout)])
def test_an_infeasible_plan_without_a_budget_has_no_more_engines_than_bring_anything(
    profile: Profile, layouts: tuple[Layout, ...]
) -> None:
    plan, _ = plan_deployment(profile, LOAD, Sla(ttft=0.005), PlanningOptions(layouts=layouts))
    feasible, _ = plan_deployment(profile, LOAD, Sla(ttft=0.06), PlanningOptions(layouts=layouts))
    assert feasible.replicas < plan.replicas < 30
    assert plan.predicted["ttft_p95_ms"] < 1.05 * 42.2, "an idle engine takes 42.1 ms"
    assert any("no number of engines up to 4096 attains the SLA" in one for one in plan.warnings)


def test_a_load_above_all_that_is_tried_is_said_without_thousands_of_engines(profile: Profile) -> None:
    plan, _ = plan_deployment(profile, replace(LOAD, rate=5e6), SLA)
    assert not plan.feasible
    assert plan.replicas == 1
    assert any("more than 4096 engines, the most that are tried, can take" in one for one in plan.warnings)
    within, _ = plan_deployment(profile, replace(LOAD, rate=5e6), SLA, PlanningOptions(most_engines=8))
    assert within.replicas == 8, "each of them serves some"


def test_the_engines_that_run_are_kept_within_the_budget(profile: Profile) -> None:
    """Five run, four are allowed, and one less would be almost fully busy."""
    load = replace(LOAD, rate=60)
    budget = PlanningOptions(most_engines=4)
    plan, answer = plan_deployment(profile, load, SLA, budget)
    for running in range(1, 9):
        kept, kept_answer = with_running(profile, plan, answer, budget, running)
        assert plan.replicas <= kept.replicas <= 4
        assert kept_answer.plan.num_engines == kept.replicas
    without = PlanningOptions()
    assert with_running(profile, plan, answer, without, 5)[0].replicas > 4


def test_an_overload_is_written_without_numbers_that_json_lacks(profile: Profile) -> None:
    plan, _ = plan_deployment(profile, replace(LOAD, rate=5000), SLA, PlanningOptions(most_engines=1))
    assert not plan.feasible
    assert plan.predicted["ttft_mean_ms"] is None
    assert plan.best_achievable is not None
    assert plan.best_achievable["needed_replicas"] > 100
    json.dumps(plan.to_json(), allow_nan=False)


def test_energy_counts_idle_engines_too(profile: Profile) -> None:
    load = replace(LOAD, rate=2)
    plan, answer = plan_deployment(profile, load, SLA)
    measured = replace(profile, watts=100.0, idle_watts=40.0)
    joules = joules_per_token(measured, answer.plan, load)
    assert joules is not None
    least, most = (plan.replicas * watts / load.tokens_per_second for watts in (40.0, 100.0))
    assert least < joules < most
    assert joules_per_token(replace(profile, watts=None), answer.plan, LOAD) is None


def test_observed_times_and_acceptance_change_the_plan_each_in_its_way(profile: Profile) -> None:
    slower = corrected(profile, time_factor=1.5, acceptance_factor=1.0)
    assert engine_model(slower).prompt_seconds(100) == pytest.approx(1.5 * engine_model(profile).prompt_seconds(100))
    assert slower.acceptance == profile.acceptance
    for name, cost in profile.drafting.items():
        assert slower.drafting[name].seconds(2, 6) == pytest.approx(1.5 * cost.seconds(2, 6))
    worse = corrected(profile, time_factor=1.0, acceptance_factor=0.8)
    for before, after in zip(speculations(profile), speculations(worse), strict=True):
        added = before.acceptance.mean_accept_length - 1.0
        assert after.acceptance.mean_accept_length == pytest.approx(1.0 + 0.8 * added)
    assert not worse.traces  # recorded drafts are of another acceptance
    assert corrected(profile, time_factor=1.0, acceptance_factor=1.0) is profile


def test_a_factor_that_one_configuration_cannot_reach_still_corrects_the_others(profile: Profile) -> None:
    rare = replace(
        profile, acceptance=profile.acceptance | {"suffix": AcceptanceProfile(method="s", conditional=(0.1,))}
    )
    for factor, reached in ((0.4, 1.04), (20.0, 2.0)):
        found = corrected(rare, time_factor=1.0, acceptance_factor=factor)
        assert found.acceptance["suffix"].mean_accept_length == pytest.approx(reached)
    with pytest.raises(ConfigError, match="acceptance_factor: got -1; must be a finite number, at least 0"):
        corrected(profile, time_factor=1.0, acceptance_factor=-1.0)
    for factor in (0.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match=f"time_factor: got {factor:g}; must be"):
            corrected(profile, time_factor=factor, acceptance_factor=1.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (PlanningOptions(methods=("suffx",)), "did you mean 'suffix'"),
        (PlanningOptions(kind="poetry"), "no acceptance of 'suffix/poetry'"),
        (PlanningOptions(methods=("suffix",), confidence=1.5), "must be from 0.5"),
    ],
)
def test_what_was_not_profiled_cannot_be_planned(profile: Profile, options: PlanningOptions, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_deployment(profile, LOAD, SLA, options)


def test_what_was_not_measured_is_said(profile: Profile) -> None:
    """Steps of up to 32 sequences were, of 1024 tokens each."""
    wide = replace(profile, max_num_seqs=512, num_blocks=40_000)
    load = Load(rate=40, isl=1, osl=400)
    plan, _ = plan_deployment(wide, load, Sla(ttft=20.0, attainment=0.6), replace(ALONE, methods=()))
    assert plan.predicted["batch_size"] > 40
    assert any("not measured: steps of" in one and "sequences" in one for one in plan.warnings)
    long = replace(profile, max_model_len=16_384, num_blocks=40_000)
    plan, _ = plan_deployment(long, Load(rate=0.4, isl=8000, osl=400), Sla(ttft=20.0), replace(ALONE, methods=()))
    (beyond,) = [one for one in plan.warnings if "context" in one]
    assert "tokens of context (up to 32768 were measured)" in beyond


def test_a_profile_of_another_version_is_said(profile: Profile) -> None:
    plan, _ = plan_deployment(replace(profile, version="0.0.1"), LOAD, SLA)
    assert any("measured with forerun 0.0.1" in one for one in plan.warnings)


@pytest.mark.parametrize("layout", list(Layout))
def test_the_simulator_agrees_with_the_formulas(profile: Profile, layout: Layout) -> None:
    plan, answer = plan_deployment(profile, LOAD, SLA, PlanningOptions(layouts=(layout,)))
    found = simulated(profile, answer.plan, LOAD, num_requests=300)
    assert found.attainment(SLA) >= SLA.attainment - 0.03
    for name in ("ttft", "tpot", "e2el"):
        predicted = plan.predicted[f"{name}_mean_ms"] / 1e3
        # the router sends requests to the least busy engine; the formulas, at random
        assert found.latencies(name).mean == pytest.approx(predicted, rel=0.35), name


def test_what_is_planned_for_random_routing_is_simulated_with_it(profile: Profile) -> None:
    options = PlanningOptions(routing=Routing.RANDOM)
    plan, answer = plan_deployment(profile, LOAD, SLA, options)
    found = simulated(profile, answer.plan, LOAD, options, num_requests=300)
    in_turn = [number % plan.replicas for number in range(300)]
    assert [one.replica for one in found.requests] != in_turn
    assert found.latencies("e2el").mean == pytest.approx(plan.predicted["e2el_mean_ms"] / 1e3, rel=0.35)


def test_confirmation_is_written_into_the_plan(profile: Profile) -> None:
    plan, answer = plan_deployment(profile, LOAD, SLA)
    once, again = (confirmed(profile, plan, answer, num_requests=60, seed=3)[0] for _ in range(2))
    assert once == again
    assert once.simulated is not None
    assert once.simulated["num_requests"] == 60
    assert once.feasible
    assert once.replicas == plan.replicas


def test_what_the_simulator_says_of_icl_is_the_mean_of_each_request_as_the_prediction_is(profile: Profile) -> None:
    plan, answer = plan_deployment(profile, LOAD, Sla(ttft=0.5, icl=0.05))
    found = confirmed(profile, plan, answer, num_requests=60, seed=3)[0].simulated
    result = simulated(profile, answer.plan, LOAD, num_requests=60, seed=3)
    means = sorted(one.icl for one in result.requests)
    assert found is not None
    assert found["icl_mean_ms"] == pytest.approx(1e3 * sum(means) / len(means))
    assert found["icl_p99_ms"] <= 1e3 * means[-1]


def test_what_the_simulator_says_of_acceptance_leaves_the_prompt_out_as_the_prediction_does(trees: Profile) -> None:
    load = Load(rate=1.0, isl=100, osl=8)  # of so few steps the prompt's would count for a third
    plan, answer = plan_deployment(trees, load, EASY, replace(ALONE, methods=("static",)))
    assert answer.plan.policy.speculation is not None
    found = confirmed(trees, plan, answer, num_requests=400)[0].simulated
    assert found is not None
    counted = simulated(trees, answer.plan, load, num_requests=400).speculation
    assert counted.acceptance_length is not None
    assert counted.acceptance_length < 0.9 * found["acceptance_length"]
    assert found["acceptance_length"] == pytest.approx(plan.predicted["acceptance_length"], rel=0.15)


def test_what_the_simulator_says_of_acceptance_leaves_both_prompts_out_where_they_are_apart(trees: Profile) -> None:
    """Who decodes takes the prompt up in a step without a draft, too, which would count for a fifth here."""
    load, options = (
        Load(rate=1.0, isl=100, osl=8),
        PlanningOptions(layouts=(Layout.DISAGGREGATED,), methods=("static",)),
    )
    plan, answer = plan_deployment(trees, load, EASY, options)
    assert answer.plan.policy.speculation is not None
    found = confirmed(trees, plan, answer, options, num_requests=400)[0].simulated
    assert found is not None
    assert found["acceptance_length"] == pytest.approx(plan.predicted["acceptance_length"], rel=0.15)


def test_requests_that_are_longer_than_the_context_are_left_out_of_the_simulation(profile: Profile) -> None:
    load = Load(rate=5, isl=800, osl=200, isl_cv=2.0)
    plan, answer = plan_deployment(profile, load, EASY)
    found, _ = confirmed(profile, plan, answer, num_requests=300)
    assert found.simulated is not None
    num_left_out = 300 - found.simulated["num_requests"]
    assert 0 < num_left_out < 100
    assert any(one.startswith(f"{num_left_out} of 300 requests") for one in found.warnings)


def test_a_simulation_of_which_no_request_fits_the_context_says_why(profile: Profile) -> None:
    load = Load(rate=5, isl=800, osl=200, isl_cv=2.0)
    plan, answer = plan_deployment(profile, load, EASY)
    drawn = {seed: synthetic_requests(load, 1, seed=seed)[0] for seed in range(100)}
    too_long = next(seed for seed, one in drawn.items() if one.num_prompt_tokens > profile.max_model_len)
    with pytest.raises(
        ConfigError, match=r"got 1 requests .* each longer than the engine's context of 4096 tokens; give a"
    ):
        confirmed(profile, plan, answer, num_requests=1, seed=too_long)


def test_engines_are_added_where_the_simulator_falls_short(profile: Profile) -> None:
    """A plan that claims that one engine is enough for what takes several."""
    plan, answer = plan_deployment(profile, LOAD, SLA)
    search = FleetSearch(engine_model(profile), LOAD, SLA, PlanningOptions().transfer)
    too_few = replace(answer, plan=search.at(answer.plan.policy, 0, 2))
    found, found_answer = confirmed(profile, replace(plan, replicas=2), too_few, num_requests=120)
    assert found_answer.plan.num_engines == found.replicas
    assert found.feasible
    assert found.replicas > 2
    assert any("the simulator asked for" in one for one in found.warnings)
    within = PlanningOptions(most_engines=2)
    kept, _ = confirmed(profile, replace(plan, replicas=2), too_few, within, num_requests=120)
    assert not kept.feasible
    assert kept.replicas == 2
    assert kept.best_achievable is not None
    assert kept.best_achievable["attainment"] < SLA.attainment
    assert math.isfinite(kept.best_achievable["ttft_mean_ms"])
    assert kept.best_achievable["needed_replicas"] is None
    assert kept.best_achievable["limits_missed_when_idle"] == []
    assert any("give a larger budget" in one for one in kept.warnings)


def test_engines_that_do_not_help_in_the_simulator_are_not_planned(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the simulator, whatever it is given, attains the SLA for four of five requests."""
    plan, answer = plan_deployment(profile, LOAD, SLA)
    monkeypatch.setattr(SimulationResult, "attainment", lambda *_: 0.8)
    found, found_answer = confirmed(profile, plan, answer, num_requests=20)
    assert not found.feasible
    assert not found_answer.is_feasible
    assert found.replicas == found_answer.plan.num_engines == plan.replicas
    assert found.best_achievable is not None
    assert found.best_achievable["needed_replicas"] is None
    (said,) = [one for one in found.warnings if "the simulator attains" in one]
    assert "8 more engines are not enough either" in said
    assert "budget" not in said
