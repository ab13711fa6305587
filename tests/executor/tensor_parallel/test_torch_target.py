"""A target that torch computes in three processes writes what one writes; a process that dies fails requests."""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.build import load_target
from forerun.config.settings import EngineSettings
from forerun.errors import ConfigError, WorkerError
from forerun.executor.tensor_parallel import torch_target
from tests.contract.drafters import CASES, usually
from tests.contract.test_contract import assert_nothing_is_held
from tests.engines import tiny_llm
from tests.native import needs_kernels
from tests.tensor_parallel import CPU, cores, cores_for_ranks, save_model, texts_and_drafts, torch_target_of, worker_ids

pytestmark = [
    needs_kernels,  # whose library brings messages
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux shares memory so"),
]
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
NOTICED_S = 3.0


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Gemma 2: norms on both sides, windows, soft caps, a tied and scaled embedding; its three KV heads are 2 + 1."""
    return save_model(tmp_path_factory.mktemp("model"), "Gemma2ForCausalLM")


@pytest.fixture(scope="module")
def two_ranks(path):
    """The model in two processes."""
    return torch_target_of(path, 2)


@pytest.fixture(scope="module")
def plainly(path):
    """What each request gets from one process that drafts nothing."""
    return texts_and_drafts(tiny_llm(target=torch_target_of(path, 1)), count=8)[0]


@pytest.mark.parametrize("name", ["plain", "suffix-tree", "eagle3", "draft-model-tree", "self-exit"])
def test_texts_are_those_of_one_process_with_any_drafter(two_ranks, plainly, name):
    llm = tiny_llm(
        CASES[name], target=two_ranks, num_gpu_blocks_override=40, max_num_batched_tokens=48, max_num_seqs=24
    )
    texts, drafts = texts_and_drafts(llm, count=8)
    assert texts == plainly
    assert any(token_ids for step in drafts for token_ids, _ in step) == (name != "plain")
    assert_nothing_is_held(llm)


@pytest.mark.parametrize(
    "name",
    usually(
        ["draft-model-tree", "eagle", "eagle3", "peagle", "draft-model-foreign"], chosen=("draft-model-tree", "eagle3")
    ),
)
def test_a_drafter_that_both_compute_drafts_what_one_drafts(two_ranks, name):
    found = [
        texts_and_drafts(tiny_llm(CASES[name] | {"draft_tensor_parallel_size": size}, target=two_ranks), count=6)
        for size in (1, 2)
    ]
    assert found[0] == found[1]
    assert any(token_ids for step in found[0][1] for token_ids, _ in step)


def test_a_rank_that_is_killed_fails_the_request_at_once_and_all_later_ones(path):
    before = set(worker_ids())
    llm = tiny_llm(target=torch_target_of(path, 2))
    (killed,) = set(worker_ids()) - before
    threading.Timer(0.2, os.kill, (killed, signal.SIGKILL)).start()
    failed = None
    while failed is None:
        started = time.monotonic()
        try:
            llm.generate([[5, 6, 7]] * 4, LONG, use_tqdm=False)
        except WorkerError as error:
            failed = str(error)
    assert time.monotonic() - started < NOTICED_S
    assert re.search(rf"rank 1 \(process {killed}\) was killed \(SIGKILL\).*load the model again", failed)
    with pytest.raises(WorkerError, match="was killed"):
        llm.generate([[5]], LONG, use_tqdm=False)


def test_a_dtype_that_the_kernels_do_not_have_is_computed_by_torch_in_two_processes(path):
    with cores_for_ranks(2):
        llm = LLM(str(path), dtype="float16", tensor_parallel_size=2, max_model_len=64)
    (output,) = llm.generate([[7, 8, 9]], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert output.outputs[0].token_ids


# --- what is refused before anything starts -------------------------------------------------------


def load(path, **settings):
    with cores(8):
        return load_target(path, EngineSettings(model=str(path), dtype="float64", **settings), CPU)


def test_a_number_of_processes_that_cannot_share_the_heads_is_refused(path):
    with pytest.raises(
        ConfigError, match="got 4; 3 key heads, each read by 2 query heads, can be shared out among 1, 2, 3, 6"
    ):
        load(path, tensor_parallel_size=4)


def test_without_the_native_library_it_is_refused(path, monkeypatch):
    monkeypatch.setenv("FORERUN_CPU_KERNELS", "off")
    with pytest.raises(
        ConfigError, match="got 2; the processes wait for each other in the native library, which is not"
    ):
        load(path, tensor_parallel_size=2)


def test_each_process_needs_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    found = torch_target.devices_of_ranks(torch.device("cuda", 1), 3)
    assert [str(device) for device in found] == ["cuda:1", "cuda:2", "cuda:3"]
    with pytest.raises(
        ConfigError, match="got 4, each on a GPU of its own, and from cuda:1 on there are 3; lower it to 3"
    ):
        torch_target.devices_of_ranks(torch.device("cuda", 1), 4)
