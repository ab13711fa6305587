"""Targets that several processes compute, of tiny checkpoints, with one thread each whatever the machine has."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch

from forerun import SamplingParams
from forerun.config.settings import EngineSettings
from forerun.executor.tensor_parallel.target import PassLimits, load_sharded_target
from forerun.executor.tensor_parallel.torch_target import load_torch_target
from forerun.models.base import LoadedTarget
from forerun.models.loader import load_model
from forerun.models.packing import Packing
from forerun.models.tokenizer import load_tokenizer
from forerun.ops.attention.paged import PagedAttention
from forerun.ops.native import threads
from forerun.ops.native.attention import NativeAttention
from tests.contract.test_contract import PROMPTS
from tests.engines import EOS, engine_of
from tests.native import KERNELS
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer

CPU = torch.device("cpu")
VOCAB_SIZE = 264
NUM_KV_HEADS = 3  # on two ranks: 2 + 1


def save_model(folder, architecture="LlamaForCausalLM", **changes):
    """A tiny checkpoint with as many key-value heads as three ranks need."""
    sizes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 1024, "num_key_value_heads": NUM_KV_HEADS}
    path = save_tiny_model(Path(folder), architecture, seed=3, **(sizes | changes))
    save_tiny_tokenizer(path, vocab_size=sizes["vocab_size"])
    return path


def worker_ids():
    """The process ids of all ranks that this process has started and that have not ended."""
    return [int(pid) for pid in _children() if b"executor.tensor_parallel." in _command_line(pid)]


def _children():
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1]) == os.getpid():
                yield folder.name


def _command_line(pid):
    with suppress(OSError):
        return Path("/proc", pid, "cmdline").read_bytes()
    return b""


def packing_of(dtype, quantization=None, *, row_bits=0):
    """How weights are packed on the best kernels."""
    return Packing.choose(next(iter(KERNELS.values())), dtype=dtype, quantization=quantization, row_bits=row_bits)


@contextmanager
def cores(count):
    """Inside the block it looks as if there were so many cores to compute on."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def cores_for_ranks(count):
    """The same, though torch itself computes with as many threads as before.

    A target of torch gives torch that number back when it is collected, which may be in the middle of any later test.
    """
    with patch.object(threads._torch_threads, "count", lambda: count):
        yield


def target_of(path, num_ranks, *, dtype=torch.bfloat16, quantization=None, row_bits=0, num_threads=1):
    """The target in `num_ranks` processes of `num_threads` each; 1 for the plain one."""
    path, packing = Path(path), packing_of(dtype, quantization, row_bits=row_bits)
    target = LoadedTarget(
        model=None,
        attention=NativeAttention(packing.kernels),
        tokenizer=load_tokenizer(path),
        eos_token_ids=frozenset({EOS}),
        kernels=packing.kernels,
    )
    if num_ranks == 1:
        return replace(target, model=load_model(path, dtype=dtype, device=CPU, packing=packing))
    settings = EngineSettings(model=str(path))
    limits = PassLimits(max_rows=2048, max_num_seqs=settings.max_num_seqs, max_model_len=None, block_size=4)
    with cores(num_ranks * num_threads):
        sharded = load_sharded_target(
            path, load_format="auto", dtype=dtype, packing=packing, num_ranks=num_ranks, limits=limits
        )
    return replace(target, model=sharded.model, make_cache=sharded.make_cache, ranks=sharded.drafter_ranks)


def torch_target_of(path, num_ranks, *, dtype=torch.float64, device=CPU):
    """The target of which torch computes a part in each of `num_ranks` processes; 1 for the plain one."""
    path = Path(path)
    target = LoadedTarget(
        model=None,
        attention=PagedAttention(),
        tokenizer=load_tokenizer(path),
        eos_token_ids=frozenset({EOS}),
    )
    if num_ranks == 1:
        return replace(target, model=load_model(path, dtype=dtype, device=device))
    limits = PassLimits(max_rows=2048, max_num_seqs=64, max_model_len=None, block_size=4)
    with cores_for_ranks(num_ranks):
        sharded = load_torch_target(
            path, load_format="auto", dtype=dtype, device=device, num_ranks=num_ranks, limits=limits
        )
    return replace(
        target,
        model=sharded.model,
        make_cache=sharded.make_cache,
        ranks=sharded.drafter_ranks,
    )


def texts_and_drafts(llm, *, count):
    """What `count` requests get, and all that was drafted for them."""
    drafter, drafts = engine_of(llm).drafting.drafter, []
    propose = drafter.propose

    def recording(context):
        found = propose(context)
        drafts.append([(draft.token_ids, draft.parents) for draft in found])
        return found

    drafter.propose = recording
    sampling = [SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=12, ignore_eos=True) for i in range(count)]
    outputs = llm.generate(PROMPTS[:count], sampling, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs], drafts
