"""How a GPU's memory is shared out, and what is said where it does not suffice."""

from __future__ import annotations

import logging

import pytest
import torch

from forerun import build
from forerun.config.gpu_memory import (
    MeasuredSteps,
    check_share,
    check_weights,
    loading,
    measure_share,
    memory_of,
    used_bytes,
)
from forerun.config.settings import EngineSettings
from forerun.errors import MemoryBudgetError, StepError
from forerun.executor.device_computation import DeviceComputation
from forerun.executor.largest_step import MeasuredDrafter
from forerun.models.loader import expected_bytes
from tests.contract.drafters import CASES, NGRAM
from tests.engines import VOCAB_SIZE, tiny_llm, tiny_target
from tests.gpus import FakeMemory
from tests.stand_in import save_stand_in
from tests.tiny_models import save_tiny_model

GIB = 1 << 30


def settings(**changes):
    return EngineSettings(model="m", **changes)


def measured(memory, *, largest=None, recorded=None, used_before=0, launch_bytes=0, **changes):
    return measure_share(
        settings(**changes),
        memory,
        used_before=used_before,
        launch_bytes=launch_bytes,
        make_steps=lambda: MeasuredSteps(largest=largest or memory.run_step, recorded=recorded),
    )


def test_kv_gets_what_weights_and_the_largest_step_leave_of_the_share():
    share = measured(FakeMemory(total=100 * GIB, tensors=20 * GIB, step_bytes=5 * GIB), gpu_memory_utilization=0.8)
    assert (share.weights, share.largest_step, share.graphs, share.libraries) == (20 * GIB, 5 * GIB, 0, 0)
    assert share.for_kv == 55 * GIB


def test_graphs_get_what_the_largest_of_them_takes_and_their_launches():
    memory = FakeMemory(total=100 * GIB, tensors=20 * GIB, step_bytes=5 * GIB)

    def recorded():
        memory.step_bytes = 3 * GIB
        memory.run_step()

    share = measured(memory, recorded=recorded, launch_bytes=2 * GIB, gpu_memory_utilization=0.8)
    assert (share.largest_step, share.graphs, share.for_kv) == (5 * GIB, 5 * GIB, 50 * GIB)


def test_kv_that_the_steps_need_is_not_what_they_take():
    memory = FakeMemory(total=100 * GIB, tensors=20 * GIB, step_bytes=5 * GIB)

    def make_steps():
        memory.tensors += GIB
        return MeasuredSteps(largest=memory.run_step, recorded=memory.run_step)

    share = measure_share(settings(), memory, used_before=0, launch_bytes=0, make_steps=make_steps)
    assert (share.weights, share.largest_step, share.graphs) == (20 * GIB, 5 * GIB, 5 * GIB)


def test_what_other_processes_use_is_not_the_engines():
    memory = FakeMemory(total=100 * GIB, others=30 * GIB, tensors=20 * GIB)
    before = FakeMemory(total=100 * GIB, others=30 * GIB)
    share = measured(memory, used_before=used_bytes(before), gpu_memory_utilization=0.6)
    assert share.for_kv == 40 * GIB


def test_what_libraries_take_while_the_model_loads_is():
    memory = FakeMemory(total=100 * GIB, others=31 * GIB, tensors=20 * GIB)
    share = measured(memory, used_before=30 * GIB, gpu_memory_utilization=0.6)
    assert (share.libraries, share.for_kv) == (GIB, 39 * GIB)


def test_all_figures_are_logged(caplog):
    with caplog.at_level(logging.INFO, "forerun"):
        measured(FakeMemory(total=100 * GIB, tensors=20 * GIB, step_bytes=5 * GIB), gpu_memory_utilization=0.8)
    assert caplog.messages == [
        "GPU memory: 0.8 (gpu_memory_utilization) of 100.00 GiB are 80.00 GiB: weights 20.00 GiB, largest step 5.00 GiB, "
        "CUDA graphs 0.00 GiB, libraries 0.00 GiB, left for KV 55.00 GiB"
    ]


def test_a_share_that_is_not_free_is_refused_before_anything_is_loaded():
    memory = FakeMemory(total=100 * GIB, others=30 * GIB)
    check_share(settings(gpu_memory_utilization=0.7), memory)
    with pytest.raises(
        MemoryBudgetError,
        match=r"got 0\.9, which is 90\.00 GiB of 100\.00 GiB, but 70\.00 GiB are free, 20\.00 GiB too little; .* set it to 0\.7$",
    ):
        check_share(settings(), memory)


def test_memory_that_an_engine_before_has_left_to_torch_is_free():
    memory = FakeMemory(total=100 * GIB, cached=80 * GIB)
    check_share(settings(), memory)
    assert memory.free_and_total() == (100 * GIB, 100 * GIB)


@pytest.mark.parametrize("given", [{"kv_cache_memory_bytes": GIB}, {"num_gpu_blocks_override": 100}])
def test_kv_of_a_size_that_is_asked_for_takes_no_share(given):
    check_share(settings(**given), FakeMemory(total=100 * GIB, others=90 * GIB))


def test_weights_that_are_larger_than_the_gpu_are_refused_with_what_is_missing():
    memory = FakeMemory(total=80 * GIB)
    check_weights(80 * GIB, settings(), memory)
    with pytest.raises(
        MemoryBudgetError,
        match=r"take 140\.00 GiB, got 80\.00 GiB; 60\.00 GiB are missing: .*tensor_parallel_size above 1",
    ):
        check_weights(140 * GIB, settings(), memory)


def test_the_expected_bytes_of_weights_are_those_that_are_loaded(tmp_path):
    path = save_tiny_model(tmp_path, seed=1, vocab_size=VOCAB_SIZE)
    model = build.LOADERS["auto"](path, dtype=torch.float32, device=torch.device("cpu"))
    expected = expected_bytes(path, dtype=torch.float32)
    vectors = expected - model.weight_bytes
    assert 0 < vectors < 0.2 * expected, "norms, and the embedding where it is not the head too"
    assert expected_bytes(path, dtype=torch.bfloat16) == expected // 2


def test_weights_that_do_not_fit_after_all_say_what_to_lower():
    with (
        pytest.raises(MemoryBudgetError, match=r"more than the 8\.00 GiB that were free; .* smaller model"),
        loading(settings(), FakeMemory(total=8 * GIB)),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


def test_other_errors_while_loading_stay_what_they_are():
    with pytest.raises(RuntimeError, match="shapes"), loading(settings(), FakeMemory(total=8 * GIB)):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


def test_a_largest_step_that_does_not_fit_names_what_makes_it_large():
    def run_largest_step():
        raise StepError("device memory: a step did not fit")

    with pytest.raises(
        MemoryBudgetError, match=r"lower max_num_batched_tokens \(2048\), max_num_seqs \(64\) or max_model_len"
    ):
        measured(FakeMemory(total=GIB), largest=run_largest_step)


def test_memory_that_something_takes_meanwhile_is_noticed():
    memory = FakeMemory(total=100 * GIB, tensors=20 * GIB)

    def run_largest_step():
        memory.others = 50 * GIB

    with pytest.raises(MemoryBudgetError, match="something else has taken memory meanwhile"):
        measured(memory, largest=run_largest_step, used_before=50 * GIB)


def test_a_cpu_has_no_share():
    assert memory_of(torch.device("cpu")) is None


# --- an engine ------------------------------------------------------------------------------------


@pytest.fixture
def memory(monkeypatch):
    """A GPU of 1 MiB beside the CPU, of which a step takes 128 KiB."""
    memory = FakeMemory(total=1 << 20, tensors=600 << 10, step_bytes=128 << 10)
    monkeypatch.setattr(build, "memory_of", lambda _device: memory)
    monkeypatch.setattr(build, "_launch_bytes", lambda *_: 0)
    run = build.LargestStep.run

    def running(step, executor):
        memory.run_step()
        memory.steps = [*getattr(memory, "steps", []), run(step, executor)]

    monkeypatch.setattr(build.LargestStep, "run", running)
    return memory


@pytest.mark.parametrize("device_step", [False, True])
@pytest.mark.parametrize("config", [None, NGRAM])
def test_an_engine_measures_its_largest_step_and_then_writes_the_same_texts(memory, config, device_step):
    llm = tiny_llm(
        config,
        num_gpu_blocks_override=None,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        device_step=device_step,
        enforce_eager=True,
    )
    assert memory.steps == [64]
    used = llm.executor.cache.num_bytes
    left = int(0.9 * (1 << 20)) - (600 << 10) - (128 << 10)
    assert 0 <= left - used < used // llm.executor.cache.num_blocks
    expected = tiny_llm().generate([[1, 2, 3]], use_tqdm=False)
    assert llm.generate([[1, 2, 3]], use_tqdm=False)[0].outputs[0].token_ids == expected[0].outputs[0].token_ids


def test_of_graphs_an_engine_measures_the_largest(memory):
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "cudagraph_capture_sizes": [1, 24]}
    tiny_llm(NGRAM, num_gpu_blocks_override=None, device_step=True, **sizes)
    assert memory.steps == [64, 24]


@pytest.mark.parametrize(
    "case", ["pard-tree", "peagle", "dflash", "medusa-dynamic-tree", "mlp-speculator-tree", "eagle3"]
)
def test_what_the_device_drafts_is_part_of_what_is_measured(memory, case, monkeypatch, caplog):
    """For all sequences, with as many tokens as a draft may have."""
    memory.total = 4 << 20
    drafted = []
    draft = DeviceComputation._draft

    def noted(computation, step, most_asked):
        found = draft(computation, step, most_asked)
        drafted.append((int((step.asked.slots >= 0).sum()), most_asked, found is not None))
        return found

    monkeypatch.setattr(DeviceComputation, "_draft", noted)
    llm = tiny_llm(
        CASES[case],
        num_gpu_blocks_override=None,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        device_step=True,
        cudagraph_capture_sizes=[1, 24],
    )
    most = llm.speculative.num_speculative_tokens
    assert drafted == [(3, most, True), (4, most, True)] * 2
    assert "drafting on the device failed" not in caplog.text
    expected = tiny_llm().generate([[1, 2, 3]], use_tqdm=False)
    assert llm.generate([[1, 2, 3]], use_tqdm=False)[0].outputs[0].token_ids == expected[0].outputs[0].token_ids


@pytest.mark.parametrize("device_step", [False, True])
def test_candidates_that_a_drafter_learns_from_are_found_in_what_is_measured_too(memory, device_step, monkeypatch):
    found = []
    monkeypatch.setattr(MeasuredDrafter, "learn", lambda _, rows: found.append(rows.candidate_ids.shape[1]))
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "enforce_eager": True}
    llm = tiny_llm(CASES["recycle"], num_gpu_blocks_override=None, device_step=device_step, **sizes)
    assert found == [llm.executor.drafting.num_candidates] * 2
    assert found[0] > 0


def test_an_engine_without_room_for_one_sequence_says_where_the_memory_went(memory):
    memory.tensors = 800 << 10
    with pytest.raises(
        MemoryBudgetError, match=r"max_model_len=128 .* weights .* largest step .* MiB are missing: lower max_model_len"
    ):
        tiny_llm(num_gpu_blocks_override=None)


def test_nothing_is_measured_where_the_settings_say_how_much_kv_there_is(memory):
    tiny_llm(num_gpu_blocks_override=64)
    tiny_llm(num_gpu_blocks_override=None, kv_cache_memory_bytes=1 << 20)
    assert not hasattr(memory, "steps")


def test_a_target_is_not_loaded_onto_a_gpu_that_others_use(memory, tmp_path):
    memory.others, memory.tensors = 200 << 10, 0
    path = save_tiny_model(tmp_path, seed=1, vocab_size=VOCAB_SIZE)
    with pytest.raises(MemoryBudgetError, match="end what else uses the GPU"):
        build.load_target(path, EngineSettings(model=str(path)), torch.device("cpu"))


def test_a_target_remembers_what_others_used_before_it(memory, tmp_path):
    memory.others, memory.tensors, memory.total = 20 << 10, 0, 1 << 30
    path = save_stand_in(tmp_path)
    target = build.load_target(path, EngineSettings(model=str(path), gpu_memory_utilization=0.5), torch.device("cpu"))
    assert target.used_before == 20 << 10
    assert tiny_target().used_before == 0
