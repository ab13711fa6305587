"""How much memory the KV cache takes on each system."""

from __future__ import annotations

import builtins
import os

from forerun.config.kv_memory import plan_kv
from forerun.config.settings import EngineSettings
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
