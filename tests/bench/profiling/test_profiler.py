"""A whole profile of a tiny model: its folder, going on after an interruption, and what is refused."""

from __future__ import annotations

import gc
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forerun.bench.profiling import step_sweep
from forerun.bench.profiling.profiler import Profiler
from forerun.bench.profiling.stages import PAGE_FILE, digest, held_stages, open_stages
from forerun.drafters.neural.forward import scratch_blocks_per_sequence
from forerun.errors import ConfigError, ForerunError
from forerun.models.base import LoadedTarget
from forerun.plan.dynamo_files import DECODE_FILE, DECODE_KEYS, MOCKER_KEYS, PREFILL_FILE, PREFILL_KEYS, read_arrays
from forerun.plan.profile import Profile
from forerun.plan.simulation.profiled import profiled_engine, recorded_requests
from forerun.plan.step_times import StepTimeModel
from tests.bench.profiling.tiny import GRID, NGRAM, draft_model, profiler, settings
from tests.contract.drafters import Stub
from tests.engines import VOCAB_SIZE, tiny_drafter
from tests.plan.profiles import WEIGHTS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "tiny"
    profiler(path, configs={"ngram": NGRAM, "model": draft_model()}).run()
    return path


def test_a_profile_is_whole_and_comes_back_from_its_folder(folder: Path) -> None:
    found = Profile.load(folder)
    assert found.model == "tiny"
    assert found.configs == {"ngram": NGRAM, "model": draft_model()}
    names = {f"{name}{kind}" for name in found.configs for kind in ("", "/a", "/b")}
    assert names >= set(found.acceptance) >= set(found.configs)
    assert found.step_times.measured is not None
    assert found.step_times.measured.sequences == 3
    assert found.conditions["grid"] == GRID.to_json()


def test_a_profile_says_what_a_drafter_adds_to_each_block(folder: Path) -> None:
    found = Profile.load(folder)
    assert found.kv_bytes_per_token is not None
    of_target = found.block_size * found.kv_bytes_per_token
    assert found.drafter_block_bytes == {"ngram": 0, "model": of_target}, "the model is the target, a little disturbed"
    each = scratch_blocks_per_sequence(3, block_size=found.block_size)
    assert found.drafter_scratch_bytes == {"ngram": 0, "model": found.max_num_seqs * each * of_target}


def test_a_profile_says_what_engine_it_is_of(tmp_path: Path) -> None:
    found = profiler(tmp_path / "p", settings=replace(settings(), device_step=False, max_model_len=300)).run()
    assert (found.tensor_parallel_size, found.device, found.kernel_settings) == (1, "cpu", {"device_step": False})
    assert found.kv_bytes_per_token is not None
    assert found.kv_cache_memory_bytes == found.num_blocks * found.block_size * found.kv_bytes_per_token


def test_a_profile_of_a_devices_steps_says_that_they_were_timed_one_at_a_time(folder: Path, tmp_path: Path) -> None:
    said: list[str] = []
    grid = replace(GRID, rounds=1, num_texts=1, max_tokens=8)
    measuring = profiler(tmp_path / "p", settings=replace(settings(), device_step=True), grid=grid, configs={})
    measuring.announce = said.append
    assert "upper bounds" in measuring.run().conditions["timing"]
    assert "upper bounds" in said[-1]
    assert Profile.load(folder).conditions["timing"] is None, "the host waits for its own steps anyway"


def test_the_share_that_is_done_rises_to_all(tmp_path: Path) -> None:
    shares: list[float] = []
    measuring = profiler(tmp_path / "p")
    measuring.advance = shares.append
    measuring.run()
    assert shares == sorted(shares)
    assert len(set(shares)) >= 3 * len(GRID.jobs())
    assert shares[0] < 0.1
    assert shares[-1] == pytest.approx(1.0)


def test_a_drafter_with_a_model_has_a_trace_that_its_acceptance_comes_from(folder: Path) -> None:
    found = Profile.load(folder)
    for name in found.configs:
        assert found.trace(name).num_texts == 3
        assert found.acceptance_for(name) == found.trace(name).acceptance()
    assert 0.0 < found.acceptance_for("model").conditional[0] <= 1.0
    assert found.drafting["model"].seconds(1, 6) > 0.0


def test_a_simulation_of_a_drafter_with_a_model_meets_its_recorded_drafts(folder: Path) -> None:
    engine = profiled_engine(Profile.load(folder), "model")
    assert engine.trace is not None
    found = engine.simulate(recorded_requests(engine.trace, np.arange(3.0)))
    num_steps = sum(one.num_chunks for one in found.requests)
    num_tokens = sum(one.num_output_tokens for one in found.requests)
    assert 3 < num_steps < num_tokens


def test_a_drafter_that_cannot_be_made_is_named_before_anything_is_measured(tmp_path: Path) -> None:
    configs = {"ngram": NGRAM, "gone": draft_model(model="no/such")}
    with pytest.raises(ForerunError, match=r"gone: .*no/such"):
        profiler(tmp_path / "p", configs=configs).run()
    assert not (tmp_path / "p").exists()


def test_a_verifier_that_draws_anew_is_profiled_by_rates(tmp_path: Path) -> None:
    config = draft_model(draft_sample_method="probabilistic", rejection_sample_method="standard")
    found = profiler(tmp_path / "p", configs={"drawn": config}, temperature=1.0).run()
    assert not found.traces
    assert found.acceptance_for("drawn").num_reached[0] > 0


def test_dynamos_files_are_there_for_every_draft_length(folder: Path) -> None:
    assert read_arrays(folder / PREFILL_FILE, PREFILL_KEYS)["prefill_isl"].tolist() == [4, 8, 16]
    assert len(read_arrays(folder / DECODE_FILE, DECODE_KEYS)["z_itl"]) == 4
    for length in (0, 2):
        found = read_arrays(folder / f"decode_k{length}" / "raw_data.npz", ("batch", "y_context_length", "K"))
        assert set(zip(*(values.tolist() for values in found.values()), strict=True)) == {
            (n, context, length) for n in (1, 3) for context in (8, 24)
        }
        read_arrays(folder / f"mocker_k{length}.npz", MOCKER_KEYS)


def test_the_page_needs_no_other_file(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    page = (folder / PAGE_FILE).read_text(encoding="utf-8")
    assert page.count("<svg") >= 5
    for reference in ("src=", "<link", "@import"):
        assert reference not in page


def test_an_interrupted_profile_measures_only_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[int] = []
    run_round = step_sweep.StepSweep.run_round

    def counted(self: step_sweep.StepSweep, number: int, *args: object) -> step_sweep.RoundResult:
        if number == 1 and rounds.count(1) == 0:
            rounds.append(number)
            raise KeyboardInterrupt
        rounds.append(number)
        return run_round(self, number)

    monkeypatch.setattr(step_sweep.StepSweep, "run_round", counted)
    with pytest.raises(KeyboardInterrupt):
        profiler(tmp_path / "p").run()
    with pytest.raises(ConfigError, match="was interrupted"):
        Profile.load(tmp_path / "p")
    rounds_before = [number for number in rounds if number >= 0]
    said: list[str] = []
    shares: list[float] = []
    again = profiler(tmp_path / "p")
    again.announce, again.advance = said.append, shares.append
    (tmp_path / "p" / "stages" / "seconds.json").write_text('{"seconds": 1e6}')
    assert again.run().conditions["seconds"] > 1e6, "both pieces count"
    assert 0.0 < shares[0] < shares[1], "the round that was kept is done"
    assert [number for number in rounds if number >= 0][len(rounds_before) :] == [1]
    assert any("going on from there" in line for line in said)
    with pytest.raises(ConfigError, match="has a profile already"):
        profiler(tmp_path / "p").run()


def test_a_budget_chooses_a_grid_that_there_is_room_for_and_says_when_it_is_short(tmp_path: Path) -> None:
    said: list[str] = []
    task = profiler(tmp_path, grid=None, budget_seconds=1e-6)
    task.announce = said.append
    llm = task._sweep_engine()
    grid = task._grid(llm, task._rough_times(llm))
    assert (grid.num_sequences, grid.contexts) == ((1, 2, 4), (128,)), "of the quick one two batches would be left"
    assert "short for the smallest grid" in said[0]
    assert said[1].startswith(
        "the engine has no room for input_lengths 512, 1024; num_sequences 8, 16, 32; contexts 1024"
    )


def test_a_budget_finds_no_grid_for_an_engine_without_room(tmp_path: Path) -> None:
    small = replace(settings(), num_gpu_blocks_override=425)
    task = profiler(tmp_path, settings=small, grid=None, budget_seconds=60.0)
    with pytest.raises(ConfigError, match="leave no more"):
        task._grid(task._sweep_engine(), StepTimeModel(WEIGHTS))


def test_what_of_a_grid_the_engine_has_no_room_for_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    task = profiler(tmp_path, grid=replace(GRID, contexts=(8, 24, 4000)))
    task.announce = said.append
    assert task._grid(task._sweep_engine(), StepTimeModel(WEIGHTS)) == GRID
    assert any("no room for contexts 4000" in line for line in said)


def test_prompts_whose_answers_do_not_fit_are_named_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"prompt 2 of 'a' has 490 tokens, .* max_model_len is 512"):
        profiler(tmp_path / "p", prompts={"a": [[7] * 4, [7] * 490]}).run()
    assert not (tmp_path / "p").exists()


def test_drafts_longer_than_the_answers_are_judged_as_far_as_these_go(tmp_path: Path) -> None:
    grid = replace(GRID, rounds=1, num_texts=1)
    found = profiler(tmp_path / "p", configs={"long": NGRAM | {"num_speculative_tokens": 20}}, grid=grid).run()
    assert 1 <= found.acceptance_for("long").num_places <= GRID.max_tokens - 2
    assert found.trace("long").num_speculative_tokens == 20


def test_a_profile_goes_on_whatever_the_order_of_its_configurations_is_by_now(tmp_path: Path) -> None:
    configs = {"ngram": NGRAM, "suffix": {"method": "suffix", "num_speculative_tokens": 3}}
    grid = replace(GRID, rounds=1, num_texts=1)
    first = profiler(tmp_path / "p", configs=configs, grid=grid).run()
    (tmp_path / "p" / "profile.json").unlink()
    again = profiler(tmp_path / "p", configs=dict(reversed(configs.items())), grid=grid).run()
    assert again.drafting == first.drafting
    assert {name: again.trace(name).name for name in again.configs} == {"suffix": "suffix", "ngram": "ngram"}


def test_a_profile_leaves_a_servers_pools_as_they_are(tmp_path: Path) -> None:
    configs = {"suffix": {"method": "suffix", "num_speculative_tokens": 3}}
    grid = replace(GRID, rounds=1, num_texts=1)
    pools = tmp_path / "pools"
    profiler(tmp_path / "p", configs=configs, grid=grid, settings=replace(settings(), pools_folder=pools)).run()
    gc.collect()  # engines save when they are gone
    assert [*pools.iterdir()] == []


@pytest.mark.parametrize("stage", ["round-1", f"drafter-{digest('ngram')}"])
def test_a_damaged_stage_is_named(tmp_path: Path, stage: str) -> None:
    profiler(tmp_path / "p").run()
    (tmp_path / "p" / "profile.json").unlink()
    (tmp_path / "p" / "stages" / f"{stage}.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"{stage}\.json is damaged \(lacks .*delete it"):
        profiler(tmp_path / "p").run()


def test_a_profile_goes_on_with_its_kv_memory_whatever_is_free_by_now(tmp_path: Path) -> None:
    first = profiler(tmp_path)
    open_stages(tmp_path, first._identity(first._sweep_engine(), GRID))
    begun_with = settings().num_gpu_blocks_override
    by_default = replace(settings(), num_gpu_blocks_override=None)
    assert profiler(tmp_path, settings=by_default)._settings_as_begun().num_gpu_blocks_override == begun_with
    anew = replace(profiler(tmp_path, settings=by_default), overwrite=True)
    assert anew._settings_as_begun().num_gpu_blocks_override is None
    assert profiler(tmp_path / "other", settings=by_default)._settings_as_begun() == by_default
    for other in (replace(by_default, model="larger"), replace(by_default, gpu_memory_utilization=0.3)):
        assert profiler(tmp_path, settings=other)._settings_as_begun() == other, "whose blocks may not fit into memory"


def test_a_profile_begun_within_a_budget_goes_on_with_its_grid(tmp_path: Path) -> None:
    first = profiler(tmp_path)
    llm = first._sweep_engine()
    open_stages(tmp_path, first._identity(llm, GRID))
    again = profiler(tmp_path, grid=None, budget_seconds=1e-6)
    assert again._grid(llm, StepTimeModel(WEIGHTS)) == GRID


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"prompts": {"a": [[30, 31] * 6, [40, 41] * 5], "b": [[50, 51, 52, 53]]}}, r"prompts_digest\.a"),
        ({"settings": replace(settings(), num_gpu_blocks_override=701)}, "num_blocks"),
        ({"settings": replace(settings(), tensor_parallel_size=2)}, "tensor_parallel_size"),
        ({"settings": replace(settings(), device_step=False)}, r"kernel_settings\.device_step"),
        ({"settings": replace(settings(), load_format="dummy")}, "load_format"),
        ({"settings": replace(settings(), gpu_memory_utilization=0.3)}, "gpu_memory_utilization"),
        ({"settings": replace(settings(), pools_folder="pools")}, "pools_folder"),
    ],
)
def test_stages_of_other_prompts_weights_memory_or_processes_are_not_taken(
    tmp_path: Path, changes: dict[str, object], name: str
) -> None:
    first = profiler(tmp_path)
    open_stages(tmp_path, first._identity(first._sweep_engine(), GRID))
    with pytest.raises(ConfigError, match=f"another {name} "):
        profiler(tmp_path, **changes).run()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": {}}, "prompts: got none"),
        ({"configs": {"none": NGRAM | {"num_speculative_tokens": 0}}}, "none: got num_speculative_tokens 0"),
        ({"budget_seconds": 0.0}, "budget: got 0 s"),
        ({"configs": {"a/b": NGRAM}}, "may not contain /"),
        (
            {"configs": {"suffix": {"method": "suffix", "num_speculative_tokens": None}}},
            "configs, suffix: got num_speculative_tokens=None; must be a whole number",
        ),
        (
            {"configs": {"own": {"method": Stub, "num_speculative_tokens": 2}}},
            "configs, own: got method=.*; must be a text",
        ),
        ({"temperature": -1.0}, "temperature: got -1.0; must be 0 or more"),
        ({"temperature": float("nan")}, "temperature: got nan"),
    ],
)
def test_what_cannot_be_profiled_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        profiler(tmp_path, **changes)


def answering_in_a_word(measuring: Profiler) -> Profiler:
    """The same profile of a model that ends each answer with its first token."""
    return replace(measuring, target=replace(measuring.target, eos_token_ids=frozenset(range(VOCAB_SIZE))))


def test_answers_too_short_for_any_draft_are_refused_before_anything_is_measured(tmp_path: Path) -> None:
    measuring = answering_in_a_word(profiler(tmp_path / "p"))
    with pytest.raises(
        ConfigError, match="answers each of them in fewer than 3 tokens, by which no draft can be judged"
    ):
        measuring.run()
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"configs": {}},
        {
            "configs": {"drawn": draft_model(draft_sample_method="probabilistic", rejection_sample_method="standard")},
            "temperature": 1.0,
        },
    ],
    ids=["nobody drafts", "drafts are judged in an engine"],
)
def test_short_answers_do_where_no_draft_is_judged_by_them(tmp_path: Path, changes: dict[str, object]) -> None:
    measuring = answering_in_a_word(profiler(tmp_path, **changes))
    measuring._check_answers(measuring._sweep_engine(), GRID)


def test_a_profile_of_made_up_weights_says_so(folder: Path, tmp_path: Path) -> None:
    said: list[str] = []
    grid = replace(GRID, rounds=1, num_texts=1, max_tokens=8)
    measuring = profiler(tmp_path / "p", settings=replace(settings(), load_format="dummy"), grid=grid, configs={})
    measuring.announce = said.append
    assert "the weights were made up" in measuring.run().conditions["weights"]
    assert said[-1].startswith("warning: the weights were made up")
    assert Profile.load(folder).conditions["weights"] is None


def test_stages_of_another_model_of_the_same_name_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = profiler(tmp_path)
    open_stages(tmp_path, first._identity(first._sweep_engine(), GRID))
    monkeypatch.setattr(LoadedTarget, "fingerprint", lambda _: "trained further")
    with pytest.raises(ConfigError, match="another fingerprint "):
        profiler(tmp_path).run()


def test_stages_of_a_drafter_that_was_trained_further_are_not_taken(tmp_path: Path) -> None:
    head = tmp_path / "head"
    shutil.copytree(tiny_drafter(VOCAB_SIZE), head)
    configs = {"ngram": NGRAM, "model": draft_model(model=str(head))}
    first = profiler(tmp_path / "p", configs=configs)
    open_stages(tmp_path / "p", first._identity(first._sweep_engine(), GRID))
    weights = head / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ConfigError, match=r"another drafters\.model\..*/head "):
        profiler(tmp_path / "p", configs=configs).run()


def test_a_profile_is_measured_in_one_process_at_a_time(tmp_path: Path) -> None:
    grid = replace(GRID, rounds=1, num_texts=1, max_tokens=8)
    first = profiler(tmp_path / "p", grid=grid, configs={})
    with held_stages(tmp_path / "p", first._identity(first._sweep_engine(), grid)):
        for again in (first, replace(first, overwrite=True)):
            with pytest.raises(ConfigError, match="another process measures into"):
                again.run()
    first.run()
