"""Every family, weight format and drafter in two and three processes, to the bit; and how groups end."""

from __future__ import annotations

import functools
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.bench.prompts import WORKLOADS
from forerun.errors import WorkerError
from forerun.executor.tensor_parallel import worker
from forerun.models.loader import LOADERS
from tests.contract.drafters import CASES
from tests.contract.test_bit_identical import run
from tests.engines import tiny_llm
from tests.family_gguf import FAMILY_GGUFS, save_family
from tests.heads_mtp import add_mtp_layers
from tests.native import needs_kernels
from tests.tensor_parallel import cores, save_model, target_of, texts_and_drafts, torch_target_of, worker_ids
from tests.tiny_models import SPECIAL, WITH_EXPERTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), needs_kernels]
COUNT = 60
FAMILIES = sorted(SPECIAL.keys() - WITH_EXPERTS)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DRAFTERS_WITH_LAYERS = [name for name in CASES if name.startswith(("draft-model", "pard", "eagle", "peagle", "mtp"))]
both_sizes = pytest.mark.parametrize("num_ranks", [2, 3])


@functools.cache
def folder_of(architecture):
    return save_model(tempfile.mkdtemp(), architecture)


@functools.cache
def plainly(architecture, dtype, quantization=None):
    """What one process gives each request, without drafts."""
    target = target_of(folder_of(architecture), 1, dtype=DTYPES[dtype], quantization=quantization)
    return run(tiny_llm(target=target), COUNT)


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
@both_sizes
def test_every_family_gives_the_bits_of_one_process(architecture, dtype, num_ranks):
    target = target_of(folder_of(architecture), num_ranks, dtype=DTYPES[dtype])
    for name in ("plain", "recycle"):
        assert run(tiny_llm(CASES[name], target=target), COUNT) == plainly(architecture, dtype), name


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Olmo2ForCausalLM", "Gemma2ForCausalLM"])
def test_ranks_of_several_threads_give_the_bits_of_one_process(architecture):
    target = target_of(folder_of(architecture), 2, num_threads=2)
    assert target.kernels.num_threads == 2
    assert run(tiny_llm(CASES["recycle"], target=target), COUNT) == plainly(architecture, "bf16")


@both_sizes
def test_int8_weights_give_the_bits_of_one_process(num_ranks):
    target = target_of(folder_of("LlamaForCausalLM"), num_ranks, quantization="int8")
    expected = plainly("LlamaForCausalLM", "bf16", "int8")
    assert run(tiny_llm(CASES["recycle"], target=target), COUNT) == expected
    assert expected != plainly("LlamaForCausalLM", "bf16")


@functools.cache
def shared_target(dtype, num_ranks):
    return target_of(folder_of("LlamaForCausalLM"), num_ranks, dtype=DTYPES[dtype])


@functools.cache
def mtp_folder():
    """The model with a random MTP layer beside it."""
    folder = Path(tempfile.mkdtemp(), "mtp")
    shutil.copytree(folder_of("LlamaForCausalLM"), folder)
    return add_mtp_layers(folder, "llama")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
@both_sizes
def test_every_drafter_gives_the_bits_of_one_process(name, dtype, num_ranks):
    target = replace(shared_target(dtype, num_ranks), path=mtp_folder() if name == "mtp" else None)
    llm = tiny_llm(CASES[name], target=target, num_gpu_blocks_override=40, max_num_batched_tokens=48, max_num_seqs=24)
    assert run(llm, COUNT) == plainly("LlamaForCausalLM", dtype)


@pytest.mark.parametrize("name", DRAFTERS_WITH_LAYERS)
@pytest.mark.parametrize("dtype", DTYPES)
@both_sizes
def test_every_drafter_with_layers_drafts_on_all_ranks_what_it_drafts_on_one(name, dtype, num_ranks):
    target = replace(shared_target(dtype, num_ranks), path=mtp_folder() if name == "mtp" else None)
    found = [
        texts_and_drafts(tiny_llm(CASES[name] | {"draft_tensor_parallel_size": size}, target=target), count=20)
        for size in (1, num_ranks)
    ]
    assert found[0] == found[1]
    assert any(token_ids for step in found[0][1] for token_ids, _ in step)


# --- where torch computes, in fp64, of which no rounding shows in a text --------------------------


@functools.cache
def torch_target(num_ranks):
    return torch_target_of(folder_of("LlamaForCausalLM"), num_ranks)


@functools.cache
def plainly_in_torch():
    """What one process gives each request, without drafts."""
    return texts_and_drafts(tiny_llm(target=torch_target(1)), count=20)[0]


@pytest.mark.parametrize("name", CASES)
def test_every_drafter_gives_the_texts_of_one_process_where_torch_computes(name):
    target = replace(torch_target(2), path=mtp_folder() if name == "mtp" else None)
    llm = tiny_llm(CASES[name], target=target, num_gpu_blocks_override=40, max_num_batched_tokens=48, max_num_seqs=24)
    assert texts_and_drafts(llm, count=20)[0] == plainly_in_torch()


@pytest.mark.parametrize("name", DRAFTERS_WITH_LAYERS)
def test_every_drafter_with_layers_drafts_on_two_ranks_what_it_drafts_on_one_where_torch_computes(name):
    target = replace(torch_target(2), path=mtp_folder() if name == "mtp" else None)
    found = [
        texts_and_drafts(tiny_llm(CASES[name] | {"draft_tensor_parallel_size": size}, target=target), count=20)
        for size in (1, 2)
    ]
    assert found[0] == found[1]
    assert any(token_ids for step in found[0][1] for token_ids, _ in step)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_default_model_drafts_for_itself_on_two_ranks_what_it_drafts_on_one(quantization):
    found = []
    with cores(2):
        for size in (1, 2):
            config = {"method": "self", "quantization": quantization, "num_speculative_tokens": 4}
            config["draft_tensor_parallel_size"] = size
            llm = LLM("smollm2-135m", tensor_parallel_size=2, max_model_len=512, speculative_config=config)
            found.append(texts_and_drafts(llm, count=4))
            del llm
            gc.collect()
    assert found[0] == found[1]


@pytest.mark.parametrize("settings", [{}, {"dtype": "float32"}, {"quantization": "int8"}], ids=str)
def test_the_default_model_gives_the_bits_of_one_process(settings):
    messages = [[{"role": "user", "content": text}] for texts in WORKLOADS.values() for text in texts]
    sampling = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=24, logprobs=5, prompt_logprobs=2)
        for i in range(len(messages))
    ]
    found, before = [], set(worker_ids())
    with cores(3):
        for num_ranks in (1, 2, 3):
            llm = LLM("smollm2-135m", tensor_parallel_size=num_ranks, max_model_len=1024, **settings)
            outputs = llm.chat(messages, sampling, use_tqdm=False)
            found.append([(one.outputs[0].token_ids, one.outputs[0].logprobs, one.prompt_logprobs) for one in outputs])
            del llm
            gc.collect()
    assert found[0] == found[1] == found[2]
    assert set(worker_ids()) <= before


@pytest.mark.parametrize("kind", sorted(kind for kind, (family, _) in FAMILY_GGUFS.items() if family in FAMILIES))
def test_a_gguf_file_of_every_family_gives_the_bits_of_one_process(tmp_path, kind):
    file = save_family(tmp_path, kind)
    found = [run(tiny_llm(CASES["recycle"], target=target_of(file, num_ranks)), COUNT) for num_ranks in (1, 2)]
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])  # the kernels, and torch
def test_ranks_turn_long_texts_by_the_same_factors_of_longrope(tmp_path, dtype):
    file = save_family(tmp_path, "phi3 longrope")
    sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    found = []
    with cores(2):
        for num_ranks in (1, 2):
            llm = LLM(file, dtype=dtype, tensor_parallel_size=num_ranks, max_model_len=256)
            (output,) = llm.generate([[5, 9, 17, 3] * 40], sampling, use_tqdm=False)
            found.append(output.outputs[0].token_ids)
    assert found[0] == found[1]


def test_the_workers_end_within_two_seconds_when_rank_0_is_killed():
    program = f"""
import time
from tests.tensor_parallel import target_of, worker_ids
target = target_of({str(folder_of("LlamaForCausalLM"))!r}, 3)
print(*worker_ids(), flush=True)
time.sleep(100)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        workers = process.stdout.readline().split()
        assert len(workers) == 2
        process.kill()
    time.sleep(2)
    assert not [pid for pid in workers if Path("/proc", pid, "cwd").exists()]


def test_a_worker_that_finds_other_weights_refuses_to_start(monkeypatch):
    before = set(worker_ids())
    monkeypatch.setattr("forerun.executor.tensor_parallel.target.identity_of", lambda *_, **__: json.dumps("other"))
    with pytest.raises(WorkerError, match="finds other weights or another version of forerun than rank 0"):
        target_of(folder_of("LlamaForCausalLM"), 2)
    assert set(worker_ids()) <= before


def test_a_worker_that_dies_while_it_loads_is_named(monkeypatch):
    spec, before = worker.WorkerSpec.to_json, set(worker_ids())

    def killing(self):
        (started,) = set(worker_ids()) - before
        os.kill(started, signal.SIGKILL)
        return spec(self)

    monkeypatch.setattr(worker.WorkerSpec, "to_json", killing)
    with pytest.raises(
        WorkerError, match=r"rank 1 \(process \d+\) was killed \(SIGKILL\) before it had loaded its part"
    ):
        target_of(folder_of("LlamaForCausalLM"), 2)


def test_a_failed_load_leaves_no_process(monkeypatch):
    def fail(*_args, **_kwargs):
        raise MemoryError

    monkeypatch.setitem(LOADERS, "auto", fail)
    before = set(worker_ids())
    with pytest.raises(MemoryError):
        target_of(folder_of("LlamaForCausalLM"), 2)
    assert set(worker_ids()) <= before
