"""How much memory the KV cache takes on each system."""

from __future__ import annotations

import builtins
import os
from types import SimpleNamespace

import pytest
import torch

from forerun.config.kv_memory import graph_bytes, plan_kv, step_bytes
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


def test_on_a_gpu_what_steps_and_graphs_need_is_left_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 << 20, 100 << 20))
    gpu = torch.device("cuda")
    model, drafter = SimpleNamespace(**vars(tiny_target().model) | {"device": gpu}), Stub(target=None)
    settings = EngineSettings(
        model="tiny", gpu_memory_utilization=0.9, max_num_seqs=10**5, max_num_batched_tokens=10**5
    )
    everything = plan_kv(settings, model, drafter).num_blocks
    per_block = (50 << 20) // everything
    left = plan_kv(settings, model, drafter, num_bytes_aside=10 << 20).num_blocks
    assert left == pytest.approx((40 << 20) / per_block, rel=0.01)


def test_graphs_take_the_memory_of_the_largest_step_once_and_that_of_their_launches():
    model = tiny_target().model
    largest = step_bytes(model, num_rows=256, num_judged=256)
    assert largest > 256 * model.vocab_size * 4
    assert graph_bytes(model, []) == 0
    assert largest < graph_bytes(model, [1, 256]) < graph_bytes(model, [1, 2, 256]) < 2 * largest


def test_key_heads_that_two_processes_hold_take_their_memory_twice():
    model, drafter = tiny_target().model, Stub(target=None)
    settings = EngineSettings(model="tiny", kv_cache_memory_bytes=1 << 20, max_num_seqs=1000, max_model_len=64)
    alone = plan_kv(settings, model, drafter).num_blocks
    heads = model.kv_specs[0].num_kv_heads
    assert plan_kv(settings, model, drafter, num_kv_heads=2 * heads).num_blocks == alone // 2
