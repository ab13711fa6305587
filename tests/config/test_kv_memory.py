"""How much memory the KV cache takes on each system."""

from __future__ import annotations

import builtins
import os

import pytest

from forerun.config import kv_memory
from forerun.config.gpu_memory import MemoryShare
from forerun.config.kv_memory import kv_bytes_of, plan_kv
from forerun.config.settings import EngineSettings
from forerun.errors import MemoryBudgetError
from tests.contract.drafters import Stub
from tests.engines import tiny_llm, tiny_target


def test_a_model_is_served_where_the_system_reports_no_memory(monkeypatch):
    target = tiny_target()  # made now: transformers, which makes it, asks the system too
    open_file = builtins.open

    def open_without_proc(path, *args, **kwargs):
        if str(path).startswith("/proc/"):
            raise FileNotFoundError(path)
        return open_file(path, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", open_without_proc)
    monkeypatch.delattr(os, "sysconf")  # as on Windows
    assert (
        tiny_llm(target=target, num_gpu_blocks_override=None)
        .generate([[1, 2, 3]], use_tqdm=False)[0]
        .outputs[0]
        .token_ids
    )


def test_key_heads_that_two_processes_hold_take_their_memory_twice():
    model, drafter = tiny_target().model, Stub(target=None)
    settings = EngineSettings(model="tiny", kv_cache_memory_bytes=1 << 20, max_num_seqs=1000, max_model_len=64)
    alone = plan_kv(settings, model, drafter).num_blocks
    heads = model.kv_specs[0].num_kv_heads
    assert plan_kv(settings, model, drafter, num_kv_heads=2 * heads).num_blocks == alone // 2


def test_too_few_blocks_that_are_given_are_to_be_raised():
    settings = EngineSettings(model="tiny", num_gpu_blocks_override=2, max_model_len=64)
    with pytest.raises(MemoryBudgetError, match="lower max_model_len or raise num_gpu_blocks_override"):
        plan_kv(settings, tiny_target().model, Stub(target=None))


@pytest.mark.parametrize(
    "asked", [{"num_gpu_blocks_override": 10**12}, {"kv_cache_memory_bytes": 1 << 62, "max_num_seqs": 1 << 40}]
)
def test_more_kv_than_the_machine_has_memory_is_refused(asked):
    settings = EngineSettings(model="tiny", max_num_batched_tokens=1 << 41, **asked)
    with pytest.raises(MemoryBudgetError, match=rf"GiB, more than this machine has .*; lower {next(iter(asked))}"):
        plan_kv(settings, tiny_target().model, Stub(target=None))


def test_where_a_control_group_leaves_nothing_there_is_no_kv(monkeypatch):
    monkeypatch.setattr(kv_memory, "memory_left", lambda: 0)
    with pytest.raises(MemoryBudgetError, match=r"got 0\.0 MiB"):
        plan_kv(EngineSettings(model="tiny"), tiny_target().model, Stub(target=None))


def test_kv_takes_a_quarter_of_what_a_control_group_leaves(monkeypatch):
    monkeypatch.setattr(kv_memory, "memory_left", lambda: 4 << 20)
    settings, model = EngineSettings(model="tiny", max_num_seqs=1 << 10), tiny_target().model
    taken = kv_bytes_of(model, Stub(target=None), block_size=settings.block_size).target_block
    assert plan_kv(settings, model, Stub(target=None)).num_blocks == (1 << 20) // taken


class DraftsOnTheSide(Stub):
    """Writes its drafts to a mebibyte of its own."""

    kv_bytes_per_block = num_scratch_blocks = 0
    scratch_bytes = 1 << 20

    def use_kv(self, target_cache, *, num_blocks): ...


def test_what_a_gpu_lacks_is_said_with_what_drafts_are_written_to():
    model, drafter = tiny_target().model, DraftsOnTheSide(target=None)
    settings = EngineSettings(model="tiny", max_model_len=64)
    block = kv_bytes_of(model, drafter, block_size=settings.block_size).target_block
    share = MemoryShare(
        total=64 // settings.block_size * block, utilization=1.0, weights=0, largest_step=0, graphs=0, libraries=0
    )
    with pytest.raises(MemoryBudgetError, match=r" 1\.0 MiB are missing"):
        plan_kv(settings, model, drafter, measure=lambda: share)
