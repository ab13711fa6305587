"""How much memory the KV cache takes on each system."""

from __future__ import annotations

import builtins
import os

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
